"""The pods' seccomp filter as an OCI profile, for containers on the seccomp plane.

From these rules libseccomp builds the same filter for a container that ``qgpu.guardian.proxy.seccomp_filter`` builds
for ``qgpuctl run``: an ioctl notifies the listener if the low byte of its number is a watched one, and so does a
mapping that could be managed memory. A profile that allows calls one by one must also allow the other ioctls, and a
rule can compare an argument only once. So these rules list prefixes of numbers that together cover all unwatched
numbers. docs/decisions/0017-seccomp-by-profile.md says what differs from that filter.

A profile may list only the machine's own architecture. A rule names a call, and libseccomp looks up its number on
every listed architecture: 32-bit x86 has an ``mmap`` whose arguments are in memory, and another one named ``mmap2``.
A call of an unlisted architecture kills its caller.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qgpu.errors import InvalidValueError, NotSupportedError, RefusedError
from qgpu.guardian.proxy.seccomp_filter import (
    MAP_ANONYMOUS,
    MAP_FIXED,
    MAP_FIXED_NOREPLACE,
    MAP_SHARED,
    PROT_READ_WRITE,
    WATCHED_PREFIXES,
)
from qgpu.runtime.oci_container import Container

#: The base profile if it exists: the one that podman and related engines use.
BASE = Path("/usr/share/containers/seccomp.json")
#: The profile of a container that has none of its own.
UNCONFINED: dict[str, Any] = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": []}

_ALLOW, _NOTIFY = "SCMP_ACT_ALLOW", "SCMP_ACT_NOTIFY"
_CALLS = ("ioctl", "mmap")
_REQUEST = 1  # the index of ioctl's request argument
_ADDRESS, _PROTECTION, _FLAGS, _OFFSET = 0, 2, 3, 5  # of mmap's
#: The names of the machine's own architecture in profiles.
_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
#: The flags that identify a shared mapping of a file at an address of the caller's choice.
_FIXED = MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED | MAP_FIXED_NOREPLACE
#: The bits of a request in the order in which prefixes are built: the number's bits first.
_BITS = (*range(7, -1, -1), *range(31, 7, -1))


def listener(runtime_dir: Path) -> Path:
    """Return the socket where the daemon waits for runtimes to hand over listeners."""
    return runtime_dir / "seccomp.sock"


def profile(base: Mapping[str, Any], socket: Path) -> dict[str, Any]:
    """Add the pods' filter to a base profile. Raises InvalidValueError if the base conflicts with it."""
    if base.get("listenerPath"):
        raise InvalidValueError(
            f"seccomp profile: it has a listener already ({base['listenerPath']}); give another --base"
        )
    kept = []
    for entry in base.get("syscalls") or []:
        said = [*(entry.get("names") or ()), *filter(None, [entry.get("name")])]
        names = [name for name in said if name not in _CALLS]
        if len(names) < len(said) and (entry.get("args") or entry.get("action") != _ALLOW):
            raise InvalidValueError("seccomp profile: it has rules of its own for ioctl or mmap; give another --base")
        if names:
            kept.append({key: value for key, value in entry.items() if key != "name"} | {"names": names})
    if _NOTIFY in (base.get("defaultAction"), *(entry.get("action") for entry in kept)):
        raise InvalidValueError("seccomp profile: it sends other calls to a listener; give another --base")
    rest = {key: value for key, value in base.items() if key != "archMap"}
    rules = _rules(base.get("defaultAction") == _ALLOW)
    return rest | {"architectures": [_native()], "listenerPath": str(socket), "syscalls": [*kept, *rules]}


def check(container: Container, socket: Path) -> None:
    """Check that a container's seccomp section is a profile of ours. Raises RefusedError with the remedy."""
    section = container.seccomp
    remedy = "start it with the profile that `qgpuctl cdi profile` prints: --security-opt seccomp=FILE"
    if section.get("listenerPath") != str(socket):
        raise RefusedError(
            f"container {container.id}: on plane seccomp its seccomp listener must be {socket} and is not; {remedy}"
        )
    if strange := set(map(str, section.get("architectures") or ())) - {_native()}:
        raise RefusedError(
            f"container {container.id}: its seccomp profile allows {min(strange)}, whose calls bypass memory limits; "
            f"{remedy}"
        )
    entries = section.get("syscalls") or []
    rules = [entry for entry in entries if set(_names(entry)) & set(_CALLS)]
    if _comparable(rules) != _comparable(_rules(section.get("defaultAction") == _ALLOW)):
        raise RefusedError(f"container {container.id}: its seccomp rules for ioctl and mmap are not qgpu's; {remedy}")
    others = [entry.get("action") for entry in entries if entry not in rules]
    if _NOTIFY in (section.get("defaultAction"), *others):
        raise RefusedError(f"container {container.id}: calls other than ioctl and mmap go to qgpu's listener; {remedy}")


def _native() -> str:
    """Return the architecture that a profile may list. Raises NotSupportedError."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise NotSupportedError(f"machine {machine}: qgpu has no seccomp profile for it; supported: x86_64, aarch64")
    return _ARCHITECTURES[machine]


def _names(entry: Mapping[str, Any]) -> list[str]:
    """Return the calls of a rule. Engines' profiles may use ``name``; a runtime's config.json has ``names`` only."""
    return entry.get("names") or []


def _rules(allowed_by_default: bool) -> list[dict[str, Any]]:
    rules = [_rule(_NOTIFY, "ioctl", _masked(_REQUEST, *prefix)) for prefix in WATCHED_PREFIXES]
    writable = _masked(_PROTECTION, PROT_READ_WRITE, PROT_READ_WRITE)
    shared = _masked(_FLAGS, MAP_SHARED | MAP_ANONYMOUS, MAP_SHARED)
    start, at_start = _against_zero(_OFFSET, "SCMP_CMP_EQ"), _against_zero(_ADDRESS, "SCMP_CMP_EQ")
    rules.append(_rule(_NOTIFY, "mmap", writable, shared, _against_zero(_OFFSET, "SCMP_CMP_NE")))
    fixed = (
        (_FIXED, MAP_SHARED | MAP_FIXED),
        (_FIXED, MAP_SHARED | MAP_FIXED_NOREPLACE),
        (_FIXED, _FIXED - MAP_ANONYMOUS),
    )
    rules += [_rule(_NOTIFY, "mmap", writable, _masked(_FLAGS, *part), start, at_start) for part in fixed]
    if allowed_by_default:
        return rules
    rules += [_rule(_ALLOW, "ioctl", _masked(_REQUEST, *prefix)) for prefix in _others(0, 0, 0)]
    rules += [_rule(_ALLOW, "mmap", _masked(_PROTECTION, *part)) for part in ((1, 0), (PROT_READ_WRITE, 1))]
    private = (MAP_SHARED, 0), (MAP_SHARED | MAP_ANONYMOUS, MAP_SHARED | MAP_ANONYMOUS)
    rules += [_rule(_ALLOW, "mmap", writable, _masked(_FLAGS, *part)) for part in private]
    anywhere = _masked(_FLAGS, _FIXED, MAP_SHARED)
    rules.append(_rule(_ALLOW, "mmap", writable, anywhere, start, at_start))
    return [*rules, _rule(_ALLOW, "mmap", writable, shared, start, _against_zero(_ADDRESS, "SCMP_CMP_NE"))]


def _others(mask: int, value: int, depth: int) -> Iterator[tuple[int, int]]:
    """Yield prefixes of requests, as (mask, value), that together cover exactly the unwatched requests."""
    inside = [prefix for prefix in WATCHED_PREFIXES if not (prefix[1] ^ value) & prefix[0] & mask]
    if not inside:
        yield mask, value
    elif not any(prefix[0] & ~mask == 0 for prefix in inside):
        bit = 1 << _BITS[depth]
        for half in (0, bit):
            yield from _others(mask | bit, value | half, depth + 1)


def _rule(action: str, call: str, *comparisons: dict[str, Any]) -> dict[str, Any]:
    return {"names": [call], "action": action, "args": [dict(each) for each in comparisons]}


def _masked(index: int, mask: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def _against_zero(index: int, op: str) -> dict[str, Any]:
    return {"index": index, "value": 0, "valueTwo": 0, "op": op}


def _comparable(rules: list[Any]) -> set[tuple[Any, ...]]:
    """Return rules in a comparable form: engines reorder them, add empty members and leave out zeros."""
    keys = ("index", "value", "valueTwo", "op")
    return {
        (
            *_names(rule),
            rule.get("action"),
            *(tuple(arg.get(key) or 0 for key in keys) for arg in rule.get("args") or ()),
        )
        for rule in rules
    }
