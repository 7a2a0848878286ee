"""Which handles name the same TSG, and which of them counts as the TSG.

A client of an MPS server duplicates the server's TSG and makes its channels below the new handle. The first handle
stands for the TSG; if it is freed, the next one does.
"""

from __future__ import annotations

from collections.abc import Sequence

from qgpu.guardian.accounting.rm_object import Key


class TsgHandles:
    """The TSGs of a table, by handle."""

    def __init__(self) -> None:
        #: Every handle, with the first one of its TSG.
        self._first: dict[Key, Key] = {}
        #: By first handle, the further ones, in the order in which they were made.
        self._further: dict[Key, list[Key]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._first

    def add(self, key: Key, same_as: Key | None = None) -> None:
        """Add a handle: of the TSG that ``same_as`` names, or of a TSG of its own."""
        first = self._first.get(same_as, key) if same_as is not None else key
        self._first[key] = first
        if first != key:
            self._further.setdefault(first, []).append(key)

    def drop(self, key: Key) -> None:
        """Forget a handle. If it was the first, the next takes its place."""
        if (first := self._first.pop(key, None)) is None:
            return
        if first != key:
            self._further[first].remove(key)
            return
        following = self._further.pop(key, [])
        for other in following:
            self._first[other] = following[0]
        if len(following) > 1:
            self._further[following[0]] = following[1:]

    def separate(self, key: Key) -> None:
        """Treat a handle as a TSG of its own from now on."""
        self.drop(key)
        self.add(key)

    def first(self, key: Key) -> Key:
        """Return the first handle of a TSG."""
        return self._first[key]

    def firsts(self) -> list[Key]:
        """List the TSGs, each by its first handle."""
        return [key for key, first in self._first.items() if key == first]

    def all_of(self, first: Key) -> Sequence[Key]:
        """List all handles of a TSG, given its first."""
        return first, *self._further.get(first, ())
