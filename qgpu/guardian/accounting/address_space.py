"""What UVM has mapped of one process on cards, and the page tables that this can take there."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
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


#: A place among the mappings of a process: the length, and one of that length.
Place = tuple[int, Mapping]


@dataclass(slots=True)
class AddressSpace:
    """One process's mappings."""

    pod: str
    #: In order, by the length as a power of 2: a search for a range finds few that do not reach into it.
    by_length: dict[int, list[Mapping]] = field(default_factory=dict)
    #: Possible page-table bytes by card, and their maximum: UVM returns a chunk of 2 MiB to the card only when no table
    #: lies in it.
    tables: Counter[bytes] = field(default_factory=Counter, compare=False)
    most_tables: Counter[bytes] = field(default_factory=Counter, compare=False)
    #: During a walk, the pieces of mappings that were split: they may lie before those that were not reached yet.
    _pieces: list[Mapping] | None = field(default=None, compare=False)
    #: Whether the process has ended; its mappings are forgotten in steps.
    ended: bool = field(default=False, compare=False)

    @property
    def mappings(self) -> list[Mapping]:
        """List the mappings."""
        return [*chain.from_iterable(self.by_length.values())]

    def add(self, mapping: Mapping, *, is_piece: bool = False) -> bool:
        """Add a mapping, or a piece of one that was split; False if it is there already."""
        if is_piece and self._pieces is not None:
            self._pieces.append(mapping)
        like = self.by_length.setdefault(_length(mapping), [])
        at = bisect_left(like, mapping)
        if like[at : at + 1] == [mapping]:
            return False
        like.insert(at, mapping)
        return True

    def has(self, mapping: Mapping) -> bool:
        """Tell whether a mapping is there."""
        like = self.by_length.get(_length(mapping), [])
        at = bisect_left(like, mapping)
        return like[at : at + 1] == [mapping]

    def remove(self, gone: Iterable[Mapping]) -> list[Mapping]:
        """Remove mappings, and return those that were there."""
        found = [each for each in gone if self.has(each)]
        for length, some in _by_length(found).items():
            like = self.by_length[length]
            if len(some) > _FEW:  # one by one would take too long
                out = set(some)
                like[:] = [each for each in like if each not in out]
            else:
                for each in some:
                    del like[bisect_left(like, each)]
            self._tidy(length)
        return found

    def take(self, base: int, end: int, uuid: bytes | None, *, whole: bool) -> list[Mapping]:
        """Remove and return mappings that reach into a range, for one card or for all; any, or only ``whole`` ones."""
        gone: list[Mapping] = []
        for length, place in self._places(base, end):
            left: list[Mapping] = []
            for each in self.by_length[length][place]:
                out = each.end > base and uuid in (None, each.uuid)
                out = out and not (whole and (each.base < base or each.end > end))
                (gone if out else left).append(each)
            self.by_length[length][place] = left
            self._tidy(length)
        return gone

    def _tidy(self, length: int) -> None:
        if not self.by_length[length]:
            del self.by_length[length]

    def drop(self, number: int, after: Place | None, most: int) -> tuple[Place | None, int, list[Mapping]]:
        """Remove an allocation's mappings from the ``most`` that follow a place.

        Return where to go on, None at the end, how many were looked at, and those that were removed.
        """
        for length in sorted(self.by_length):
            if after is not None and length < after[0]:
                continue
            like = self.by_length[length]
            at = bisect_right(like, after[1]) if after is not None and length == after[0] else 0
            if reach := like[at : at + most]:
                gone = [each for each in reach if each.memory == number]
                if gone:
                    like[at : at + most] = [each for each in reach if each.memory != number]
                    self._tidy(length)
                return (length, reach[-1]), len(reach), gone
        return None, 0, []

    def _places(self, base: int, end: int) -> list[tuple[int, slice]]:
        """Return, by length, the slices with all mappings that reach into a range, and few others."""
        return [
            (length, slice(bisect_left(like, (base - (1 << length),)), bisect_left(like, (end,))))
            for length, like in self.by_length.items()
        ]

    def reaching_into(self, base: int, end: int) -> list[Mapping]:
        """List all mappings that reach into a range, and a few others."""
        return [*chain.from_iterable(self.by_length[length][place] for length, place in self._places(base, end))]

    def walk(self) -> Iterator[Mapping]:
        """Yield the mappings, while mappings may come, go or be split; one that comes meanwhile may be left out."""
        self._pieces = []
        for length in list(self.by_length):
            last: Mapping | None = None
            while (following := self._following(length, last)) or self._pieces:
                if self._pieces:
                    piece = self._pieces.pop()
                    if self.has(piece):
                        yield piece
                else:
                    last = following[0]
                    yield last
        self._pieces = None

    def _following(self, length: int, last: Mapping | None) -> list[Mapping]:
        like = self.by_length.get(length, [])
        at = bisect_right(like, last) if last is not None else 0
        return like[at : at + 1]

    def more_tables(self, uuid: bytes, base: int, length: int) -> int:
        """Return how many more bytes page tables on a card may take with one more mapping."""
        return max(0, self.tables[uuid] + table_bytes(base, length) - self.most_tables[uuid])


def _length(mapping: Mapping) -> int:
    return (mapping.end - mapping.base).bit_length()


def _by_length(mappings: Iterable[Mapping]) -> dict[int, list[Mapping]]:
    found: dict[int, list[Mapping]] = {}
    for each in mappings:
        found.setdefault(_length(each), []).append(each)
    return found
