"""Handles of one kind of object by RM client, and how many each pod has."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from qgpu.guardian.accounting.sets_by_key import Counts, SetsByKey


@dataclass(slots=True)
class HandlesByClient:
    """Handles by client. Whoever changes them says which pod has the client."""

    _of: SetsByKey[int, int] = field(default_factory=SetsByKey)
    counts: Counts[str] = field(default_factory=Counts, compare=False)
    total: int = 0

    def __contains__(self, client: int) -> bool:
        return client in self._of

    def of(self, client: int) -> Set[int]:
        """Return a client's handles; do not keep the set."""
        return self._of.of(client)

    def add(self, pod: str, client: int, handle: int) -> None:
        """Add a handle, unless it is there."""
        if handle not in self._of.of(client):
            self._of.add(client, handle)
            self._count(pod, 1)

    def discard(self, pod: str, client: int, handle: int) -> None:
        """Remove a handle, if it is there."""
        if handle in self._of.of(client):
            self._of.discard(client, handle)
            self._count(pod, -1)

    def drop(self, pod: str, client: int) -> Set[int]:
        """Remove all handles of a client, and return them."""
        handles = self._of.pop(client, set())
        self._count(pod, -len(handles))
        return handles

    def move(self, client: int, before: str, after: str) -> None:
        """Count a client's handles for another pod."""
        self._count(before, -len(self.of(client)))
        self._count(after, len(self.of(client)))

    def _count(self, pod: str, more: int) -> None:
        self.total += more
        self.counts.change(pod, more)
