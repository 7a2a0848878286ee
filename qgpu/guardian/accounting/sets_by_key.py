"""Sets and counts by key, where a key with an empty set or a zero vanishes: pods choose keys, and leave none behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class SetsByKey(dict[K, set[V]]):
    """Sets by key."""

    def add(self, key: K, value: V) -> None:
        """Add a value to a key's set."""
        self.setdefault(key, set()).add(value)

    def discard(self, key: K, value: V) -> None:
        """Remove a value from a key's set, if it is there."""
        if (values := self.get(key)) is not None:
            values.discard(value)
            if not values:
                del self[key]

    def of(self, key: K) -> Set[V]:
        """Return a key's set, empty if there is none; do not keep it."""
        return self.get(key) or frozenset()


class Counts(Counter[K]):
    """Counts by key."""

    def change(self, key: K, by: int) -> None:
        """Change a key's count."""
        self[key] += by
        if not self[key]:
            del self[key]


@dataclass(slots=True)
class HandlesByClient:
    """Handles of one kind of object by RM client, and how many each pod has; whoever changes them names the pod."""

    _of: SetsByKey[int, int] = field(default_factory=SetsByKey)
    counts: Counts[str] = field(default_factory=Counts, compare=False)

    def __contains__(self, client: int) -> bool:
        return client in self._of

    def of(self, client: int) -> Set[int]:
        """Return a client's handles; do not keep the set."""
        return self._of.of(client)

    def add(self, pod: str, client: int, handle: int) -> None:
        """Add a handle, unless it is there."""
        if handle not in self._of.of(client):
            self._of.add(client, handle)
            self.counts.change(pod, 1)

    def discard(self, pod: str, client: int, handle: int) -> None:
        """Remove a handle, if it is there."""
        if handle in self._of.of(client):
            self._of.discard(client, handle)
            self.counts.change(pod, -1)

    def drop(self, pod: str, client: int) -> Set[int]:
        """Remove all handles of a client, and return them."""
        handles = self._of.pop(client, set())
        self.counts.change(pod, -len(handles))
        return handles

    def move(self, client: int, before: str, after: str) -> None:
        """Count a client's handles for another pod."""
        self.counts.change(before, -len(self.of(client)))
        self.counts.change(after, len(self.of(client)))


def while_there(known: Mapping[K, V]) -> Iterator[tuple[K, V]]:
    """Yield the items of a dictionary that others change meanwhile: each as it is then, none that is gone by then."""
    for key in list(known):
        if (value := known.get(key)) is not None:
            yield key, value
