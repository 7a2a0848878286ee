"""Tracks the memory that ended pods left on the cards: who owns it, and how much of it the owners' claims cover.

Other processes keep such memory as long as they like. So it counts against what the owner's claims hold on that card,
and only the rest is missing to others. Callers hold the pods' lock. What was left before the daemon began has no owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from qgpu.daemon.prepared_grants import PreparedGrants
from qgpu.errors import QgpuError
from qgpu.model.plane_api import Host


class OrphanedMemory:
    """What ended pods have left, by owner: a namespace of Kubernetes, or a user of Slurm (``pod_users.py``)."""

    def __init__(self, host: Host, prepared: PreparedGrants) -> None:
        self._host, self._prepared = host, prepared
        #: The pods that there are. A group's pod has all that its claim holds.
        self._pods = {pod.name for pod in host.pods()}
        #: Whose a prepared device is that containers have used.
        self._owners: dict[str, str] = {}
        #: By the name of an ended pod: its owner, and what it left when it ended, in bytes by pGPU.
        self._left: Mapping[str, tuple[str, Mapping[int, int]]] = {}

    def used(self, devices: Iterable[str], whose: str) -> None:
        """Note the owner of prepared devices."""
        known = {name: each for name, each in self._owners.items() if name in self._prepared.by_name}
        self._owners = known | dict.fromkeys(devices, whose)

    def began(self, name: str) -> None:
        """Note that a pod exists now."""
        self._pods.add(name)

    @contextmanager
    def ending(self, name: str, whose: str) -> Iterator[None]:
        """Note what a pod leaves that the block retires; nothing if the pod has no owner."""
        before = self._now() if whose else None
        yield
        self._pods.discard(name)
        after = None if before is None else self._now()
        if before is None or after is None:
            return
        if left := {index: size - before.get(index, 0) for index, size in after.items() if size > before.get(index, 0)}:
            self._left = {**self._left, name: (whose, left)}

    def forget_gone(self) -> None:
        """Forget pods of which nothing is left now. Raises a QgpuError."""
        self._left = self._there()

    def any_of(self, whose: str) -> bool:
        """Tell whether an owner's ended pods have left anything."""
        return any(owner == whose for owner, _ in self._there().values())

    def of(self, whose: str, index: int) -> int:
        """Return how many bytes of a pGPU an owner's ended pods have left."""
        there = self._there()
        return _by_owner(there, index, self._host.orphaned_memory())[whose] if there else 0

    def outside(self) -> Mapping[int, int]:
        """Return the bytes by pGPU that were left beyond what the owners' claims hold. It needs no lock."""
        now, there = self._host.orphaned_memory(), self._there()
        if not there:
            return now
        return {
            index: size
            - sum(min(mine, self.held(whose, index)) for whose, mine in _by_owner(there, index, now).items())
            for index, size in now.items()
        }

    def held(self, whose: str, index: int) -> int:
        """Return the bytes of a pGPU that an owner's claims hold, without claims whose group has its pod now."""
        return sum(
            device.grant.memory or 0
            for grant, device in self._prepared.by_name.values()
            if self._prepared.index(device) == index
            and self.owner(device.name) == whose
            and (not grant.group or grant.group not in self._pods)
        )

    def owner(self, device: str) -> str:
        """Return the owner of a prepared device; empty if there is none."""
        known = self._prepared.by_name.get(device)
        return self._owners.get(device) or ("" if known is None else f"namespace {known[0].namespace}")

    def _now(self) -> Mapping[int, int] | None:
        """Return the bytes that are left, by pGPU; None while the plane is gone."""
        try:
            return self._host.orphaned_memory()
        except QgpuError:
            return None

    def _there(self) -> Mapping[str, tuple[str, Mapping[int, int]]]:
        """Return what each ended pod left when it ended, for the pods that still have something left."""
        left = self._left
        return {name: left[name] for name in self._host.names_in_use() if name in left} if left else left


def _by_owner(left: Mapping[str, tuple[str, Mapping[int, int]]], index: int, now: Mapping[int, int]) -> Counter[str]:
    """Return the bytes left on a pGPU by owner; together no more than are left there ``now``."""
    found = Counter[str]()
    for whose, of_pod in left.values():
        found[whose] += of_pod.get(index, 0)
    at_first = found.total()
    there = min(at_first, now.get(index, 0))
    return Counter({whose: size * there // at_first for whose, size in found.items()} if there else {})
