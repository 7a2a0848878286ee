"""What UVM has mapped of one process on cards, and the page tables that this can take there."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

#: Up to this many mappings are removed one by one.
_FEW = 64
#: The size of a page table on the card, and the address range that one covers per level, as powers of 2, from the level
#: of the smallest pages up (uvm_hopper_mmu.c; older GPUs differ in the top level only).
_TABLE, _LEVELS = 4 << 10, (21, 29, 38, 47)


def table_bytes(base: int, length: int) -> int:
    """Return how many bytes of page tables on a card a mapping with no neighbours can take."""
    last = base + max(length, 1) - 1
    tables = len(_LEVELS)
    for level in _LEVELS:
        tables += (last >> level) - (base >> level)
    return _TABLE * tables


class Mapping(NamedTuple):
    """Memory that UVM has mapped for one card, from ``base`` to ``end`` of a process's address space."""

    base: int
    end: int
    uuid: bytes
    memory: int

    @property
    def tables(self) -> int:
        """Return how many bytes of page tables it can take."""
        return table_bytes(self.base, self.end - self.base)


@dataclass(slots=True)
class AddressSpace:
    """One process's mappings in order."""

    pod: str
    mappings: list[Mapping] = field(default_factory=list)
    #: The longest length so far, which bounds the search for a range.
    _longest: int = field(default=0, compare=False)
    #: Possible page-table bytes by card, and their maximum: UVM returns a chunk of 2 MiB to the card only when no table
    #: lies in it.
    tables: Counter[bytes] = field(default_factory=Counter, compare=False)
    most_tables: Counter[bytes] = field(default_factory=Counter, compare=False)
    #: Whether the process has ended; its mappings are forgotten in steps.
    ended: bool = field(default=False, compare=False)

    def add(self, mapping: Mapping) -> bool:
        """Add a mapping; False if it is there already."""
        at = bisect_left(self.mappings, mapping)
        if self.mappings[at : at + 1] == [mapping]:
            return False
        self.mappings.insert(at, mapping)
        self._longest = max(self._longest, mapping.end - mapping.base)
        return True

    def remove(self, gone: list[Mapping]) -> list[Mapping]:
        """Remove mappings, and return those that were there: a few one by one, because there can be very many."""
        if len(gone) > _FEW:
            out = set(gone)
            found = [each for each in self.mappings if each in out]
            self.mappings = [each for each in self.mappings if each not in out]
            return found
        found = []
        for each in gone:
            at = bisect_left(self.mappings, each)
            if self.mappings[at : at + 1] == [each]:
                del self.mappings[at]
                found.append(each)
        return found

    def take(self, base: int, end: int, uuid: bytes | None) -> list[Mapping]:
        """Remove and return all mappings that reach into a range, for one card or for all."""
        place = self.within(base, end)
        reach = self.mappings[place]
        gone = [each for each in reach if each.end > base and uuid in (None, each.uuid)]
        if gone:
            self.mappings[place] = [each for each in reach if each.end <= base or uuid not in (None, each.uuid)]
        return gone

    def drop(self, number: int, after: Mapping | None, most: int) -> tuple[list[Mapping], list[Mapping]]:
        """Remove an allocation's mappings from the ``most`` that follow one; return what was looked at and removed."""
        at = bisect_right(self.mappings, after) if after is not None else 0
        reach = self.mappings[at : at + most]
        gone = [each for each in reach if each.memory == number]
        if gone:
            self.mappings[at : at + most] = [each for each in reach if each.memory != number]
        return reach, gone

    def within(self, base: int, end: int) -> slice:
        """Return the slice with all mappings that reach into a range; it may contain others."""
        return slice(bisect_left(self.mappings, (base - self._longest,)), bisect_left(self.mappings, (end,)))

    def walk(self) -> Iterator[Mapping]:
        """Yield the mappings in order, while mappings may come, go or be split."""
        base = -1
        while rest := self.mappings[(at := bisect_left(self.mappings, (base + 1,))) : at + 1]:
            base, said = rest[0].base, set[Mapping]()
            while (more := next((each for each in self._at(base) if each not in said), None)) is not None:
                said.add(more)
                yield more

    def _at(self, base: int) -> list[Mapping]:
        return self.mappings[bisect_left(self.mappings, (base,)) : bisect_left(self.mappings, (base + 1,))]

    def more_tables(self, uuid: bytes, base: int, length: int) -> int:
        """Return how many more bytes page tables on a card may take with one more mapping."""
        return max(0, self.tables[uuid] + table_bytes(base, length) - self.most_tables[uuid])
