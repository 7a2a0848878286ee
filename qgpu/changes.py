"""Changes of settings as text, such as ``policy burst-share -> fixed-share``, and who made them."""

from __future__ import annotations

import pwd
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qgpu.units import format_duration, format_factor, format_memory, format_percent

#: How settings of pGPUs and grants are named and written for people.
_WRITTEN: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "period_ns": ("period", format_duration),
    "offline_floor": ("offline floor", format_percent),
    "online_policy": ("online policy", str),
    "temporary_policy": ("temporary policy", str),
    "gpu": ("pGPU", str),
    "memory_overcommit": ("memory overcommit", format_factor),
    "cores": ("quota", format_percent),
    "memory": ("limit", format_memory),
    "latency_target_ns": ("latency target", format_duration),
    "member_sm_percent": ("later members' SMs", format_percent),
    "member_memory_bytes": ("later members' limit", format_memory),
    "profiling": ("profiling", lambda allowed: "allowed" if allowed else "refused"),
    "graphics": ("graphics", lambda allowed: "allowed" if allowed else "refused"),
}


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the changed settings. A pod's grants are tables by pGPU."""
    return ", ".join(_changes(old, new)) or "no change"


def granted(grants: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what a pod was granted, by pGPU."""
    tables = ((gpu, ", ".join(_given(grant))) for gpu, grant in grants.items())
    return "; ".join(f"pGPU {gpu}: {given}" if given else f"pGPU {gpu}" for gpu, given in tables) or "-"


def _given(grant: Mapping[str, Any]) -> Iterator[str]:
    for key, value in grant.items():
        name, write = _WRITTEN.get(key, (key, str))
        if value is not None and value is not False:
            yield f"{name} {write(value)}"


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for key, after in new.items():
        if isinstance(after, dict):
            yield f"pGPU {key}: {changed(old[key], after)}"
            continue
        name, write = _WRITTEN.get(key, (key, str))
        yield f"{name} {_written(write, old[key])} -> {_written(write, after)}"


def _written(write: Callable[[Any], str], value: Any) -> str:
    return "none" if value is None else write(value)


def who(by: Mapping[str, Any]) -> str:
    """Return who made a change: user, login user if another, program and process, container."""
    name = user(by["uid"])
    login = by.get("login_uid", by["uid"])
    parts = [name if login == by["uid"] else f"{user(login)} as {name}"]
    if "program" in by:
        module = f" -m {by['module']}" if "module" in by else ""
        parts.append(f"{by['program']}{module}[{by['pid']}]")
    if "container" in by:
        parts.append(f"container {by['container']}")
    return ", ".join(parts)


def user(uid: int) -> str:
    """Return a user's name, or the number if this host knows no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
