"""Sets and counts by key, where a key with an empty set or a zero vanishes: pods choose keys, and leave none behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
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


def while_there(known: Mapping[K, V]) -> Iterator[tuple[K, V]]:
    """Yield the items of a dictionary that others change meanwhile: each as it is then, none that is gone by then."""
    for key in list(known):
        if (value := known.get(key)) is not None:
            yield key, value
