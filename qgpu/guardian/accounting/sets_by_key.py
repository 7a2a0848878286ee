"""A set for each key, where a key whose set is empty vanishes: pods choose keys, and must not leave any behind."""

from __future__ import annotations

from collections.abc import Set
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
