"""Divides what a claim holds of one card among the containers that use it at the same time.

Pure. The containers of a claim together never get more than the claim holds, at any moment: a container keeps the
memory that it has, and only the rest is divided. A single container gets everything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from qgpu.errors import RefusedError
from qgpu.model import Grant

#: The least memory with which a container may start, in bytes.
LEAST_MEMORY = 1 << 20


@dataclass(frozen=True, slots=True)
class DeviceUser:
    """A container that uses devices of one card. Lists of users are ordered: the longest-running first."""

    name: str
    devices: Collection[str]
    #: The memory that it has, in bytes.
    held: int = 0
    #: Whether a later run of the same container has begun: then this one keeps its memory and gets no more.
    leaving: bool = False


def added_up(grants: Sequence[Grant]) -> Grant:
    """Return the sum of several devices' grants on one card. Raises RefusedError for two classes.

    Quotas add up, and so do memory limits, unless one of the devices has none. The strictest latency target holds.
    """
    classes = {grant.pod_class for grant in grants}
    if len(classes) > 1:
        raise RefusedError("two devices on one pGPU are of different classes; give them to different containers")
    quotas = [grant.cores for grant in grants if grant.cores is not None]
    limits = [grant.memory for grant in grants if grant.memory is not None]
    targets = [grant.latency_target_ns for grant in grants if grant.latency_target_ns is not None]
    return Grant(
        classes.pop(),
        sum(quotas) if quotas else None,
        sum(limits) if len(limits) == len(grants) else None,
        min(targets) if len(targets) == len(grants) else None,
    )


def divided(devices: Mapping[str, Grant], users: Sequence[DeviceUser]) -> dict[str, Grant]:
    """Return each user's grant on the card, by its name.

    ``devices`` are the card's by name. Quotas are divided equally. So is memory, but a user keeps memory beyond its
    part, and the others' parts shrink in the same ratio. A limit may be less than LEAST_MEMORY. Raises RefusedError
    if a quota cannot be divided among so many.
    """
    quotas: dict[str, list[int]] = {user.name: [] for user in users}
    parts = dict.fromkeys(quotas, 0)
    for name, grant in devices.items():
        using = [user for user in users if name in user.devices]
        staying = [user.name for user in using if not user.leaving]
        if grant.cores is not None:
            if grant.cores < len(using):
                raise RefusedError(
                    f"device {name}: its quota of {grant.cores} % cannot be divided among {len(using)} containers; "
                    "end one of them, or make a claim for each"
                )
            shares = _equal(grant.cores - len(using) + len(staying), staying)
            for user in using:
                quotas[user.name].append(shares.get(user.name, 1))
        for each, part in _equal(grant.memory or 0, staying).items():
            parts[each] += part
    grants = {user.name: added_up([devices[name] for name in sorted(user.devices)]) for user in users}
    limits: dict[str, int] = {}
    for together in connected(users):
        limited = [user for user in together if grants[user.name].memory is not None]
        limits |= _memory({user.name: parts[user.name] for user in limited}, {u.name: u.held for u in limited})
    return {
        name: replace(grant, cores=sum(quotas[name]) if quotas[name] else None, memory=limits.get(name))
        for name, grant in grants.items()
    }


def spare(together: Sequence[DeviceUser], devices: Mapping[str, Grant], taken: Mapping[str, int]) -> int:
    """Return how many bytes of these users' devices are not taken; ``taken`` gives bytes by user."""
    used = {name for user in together for name in user.devices}
    return sum(devices[name].memory or 0 for name in used) - sum(taken.get(user.name, 0) for user in together)


def connected(users: Sequence[DeviceUser]) -> list[list[DeviceUser]]:
    """Return groups of users; users that share a device are in one group."""
    groups: list[list[DeviceUser]] = []
    for user in users:
        touched = [group for group in groups if any(set(other.devices) & set(user.devices) for other in group)]
        groups = [group for group in groups if group not in touched]
        groups.append([*(other for group in touched for other in group), user])
    return groups


def _equal(total: int, names: Sequence[str]) -> dict[str, int]:
    """Divide a whole number into parts that differ by one at most, the larger ones first."""
    return {name: total // len(names) + (place < total % len(names)) for place, name in enumerate(names)}


def _memory(parts: Mapping[str, int], has: Mapping[str, int]) -> dict[str, int]:
    """Return limits that add up to no more than the parts do, each at least what its user has."""
    held = {name: max(1, size) for name, size in has.items()}
    over = {name for name, part in parts.items() if not part}
    while True:
        room = max(0, sum(parts.values()) - sum(held[name] for name in over))
        base = sum(part for name, part in parts.items() if name not in over)
        limits = {name: room * part // base for name, part in parts.items() if name not in over}
        more = {name for name, limit in limits.items() if held[name] > limit}
        if not more:
            return limits | {name: held[name] for name in over}
        over |= more
