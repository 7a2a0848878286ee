"""Which devices a container may open, by the rules of its device cgroup (OCI ``linux.resources.devices``).

A container can get a device node by mknod or a mount; the rules decide whether it can open it. A container without any
rule may open everything, because crun interprets it so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qgpu.nvidia import abi

_DRM_MAJOR = 226
#: Devices that create video memory that no plane counts: (major, minor or None for all), name.
UNCOUNTED = (((_DRM_MAJOR, None), "/dev/dri"), ((abi.NV_MAJOR, abi.NV_MODESET_MINOR), "/dev/nvidia-modeset"))

Number = tuple[int, int | None]


def opens(rules: Sequence[Mapping[str, Any]], device: Number) -> bool:
    """Tell whether the rules allow any such character device to be opened. Later rules override earlier ones."""
    allowed = not rules
    for rule in rules:
        access = rule.get("access") or "rwm"
        if rule.get("allow"):
            allowed = allowed or (_meets(rule, device) and bool({"r", "w"} & set(access)))
        elif {"r", "w"} <= set(access) and _covers(rule, device):
            allowed = False
    return allowed


def _meets(rule: Mapping[str, Any], device: Number) -> bool:
    major, minor = _numbers(rule)
    return _is_of_characters(rule) and major in (None, device[0]) and (minor is None or device[1] in (None, minor))


def _covers(rule: Mapping[str, Any], device: Number) -> bool:
    major, minor = _numbers(rule)
    return _is_of_characters(rule) and major in (None, device[0]) and minor in (None, device[1])


def _is_of_characters(rule: Mapping[str, Any]) -> bool:
    return (rule.get("type") or "a") in "acu"


def _numbers(rule: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return a rule's (major, minor). None means any; engines write a negative number for that."""
    major, minor = (value if value is not None and value >= 0 else None for value in map(rule.get, ("major", "minor")))
    return major, minor
