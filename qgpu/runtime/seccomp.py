"""The pods' filter in the words of the OCI runtime specification, for containers on the seccomp plane.

What ``qgpu.guardian.filter`` assembles for ``qgpuctl run``, libseccomp assembles for a runtime from these rules: an
ioctl whose number's low byte is one of the watched ones asks whoever listens. A profile that allows calls one by one
must allow the other ioctls, and a rule holds one comparison an argument: so what is not watched is said as the few
prefixes of a byte that hold no watched number. docs/decisions/0017-seccomp-by-profile.md says what differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qgpu.errors import InvalidValueError, RefusedError
from qgpu.guardian.filter import WATCHED
from qgpu.runtime.container import Container

#: The profile to start from where there is one: that of podman and its kin.
BASE = Path("/usr/share/containers/seccomp.json")
#: What a container has without any profile of its own.
UNCONFINED: dict[str, Any] = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": []}

_ALLOW, _NOTIFY = "SCMP_ACT_ALLOW", "SCMP_ACT_NOTIFY"
_REQUEST = 1  # ioctl's second argument
_BYTE = 0xFF


def listener(runtime_dir: Path) -> Path:
    """Return where the daemon waits for runtimes to hand over listeners."""
    return runtime_dir / "seccomp.sock"


def profile(base: Mapping[str, Any], socket: Path) -> dict[str, Any]:
    """Weave the pods' filter into a profile. Raises InvalidValueError for one that cannot be woven into."""
    if base.get("listenerPath"):
        raise InvalidValueError(f"seccomp profile: it has a listener already ({base['listenerPath']})")
    kept = []
    for entry in base.get("syscalls") or []:
        names = [name for name in _names(entry) if name != "ioctl"]
        if len(names) < len(_names(entry)) and entry.get("args"):
            raise InvalidValueError("seccomp profile: it has rules of its own for arguments of ioctl")
        if names:
            kept.append({key: value for key, value in entry.items() if key != "name"} | {"names": names})
    return {**base, "listenerPath": str(socket), "syscalls": [*kept, *_rules(base.get("defaultAction") == _ALLOW)]}


def check(container: Container, socket: Path) -> None:
    """See that a container's seccomp section is a profile of ours. Raises RefusedError, which says what to do."""
    section = container.seccomp
    remedy = "start it with the profile that `qgpuctl cdi profile` prints: --security-opt seccomp=FILE"
    if section.get("listenerPath") != str(socket):
        raise RefusedError(
            f"container {container.id}: on plane seccomp its calls must come to {socket} and do not; {remedy}"
        )
    rules = [entry for entry in section.get("syscalls") or [] if "ioctl" in _names(entry)]
    if _said(rules) != _said(_rules(section.get("defaultAction") == _ALLOW)):
        raise RefusedError(f"container {container.id}: its seccomp rules for ioctl are not qgpu's; {remedy}")


def _names(entry: Mapping[str, Any]) -> list[str]:
    return entry.get("names") or [name for name in [entry.get("name")] if name]


def _rules(allowed_by_default: bool) -> list[dict[str, Any]]:
    rules = [_rule(_NOTIFY, _BYTE, number) for number in WATCHED]
    return rules if allowed_by_default else rules + [_rule(_ALLOW, *prefix) for prefix in _others(0, 0)]


def _others(mask: int, value: int) -> Iterator[tuple[int, int]]:
    """Yield the prefixes of a byte, as (mask, value), that together hold every number that is not watched."""
    inside = [number for number in WATCHED if number & mask == value]
    if not inside:
        yield mask, value
    elif mask != _BYTE:
        bit = (_BYTE ^ mask).bit_length() - 1
        for half in (0, 1 << bit):
            yield from _others(mask | 1 << bit, value | half)


def _rule(action: str, mask: int, value: int) -> dict[str, Any]:
    comparison = {"index": _REQUEST, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
    return {"names": ["ioctl"], "action": action, "args": [comparison]}


def _said(rules: list[Any]) -> set[tuple[Any, ...]]:
    """Put rules into a form that can be compared: engines reorder them, add empty members and leave out zeros."""
    keys = ("index", "value", "valueTwo", "op")
    said = set()
    for rule in rules:
        said.add((rule.get("action"), *(tuple(arg.get(key) or 0 for key in keys) for arg in rule.get("args") or ())))
    return said
