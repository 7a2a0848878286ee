"""What UVM has mapped of one process on cards, and the page tables that this can take there."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

#: Up to this many mappings are removed one by one.
_FEW = 64
#: The size of a page table on the card, and the address range that one covers per level, as powers of 2, from the level
#: of the smallest pages up (uvm_hopper_mmu.c; older GPUs differ in the top level only).
_TABLE, _LEVELS = 4 << 10, (21, 29, 38, 47)


def table_bytes(base: int, length: int) -> int:
    """Return how many bytes of page tables on a card a mapping with no neighbours can take."""
    last = base + max(length, 1) - 1
    return _TABLE * sum((last >> level) - (base >> level) + 1 for level in _LEVELS)


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


#: A card, and the length of mappings on it as a power of 2.
Kind = tuple[bytes, int]


@dataclass(slots=True)
class AddressSpace:
    """One process's mappings."""

    pod: str
    #: In order, by kind: a search for a range finds few that do not reach into it, and none of another card.
    by_kind: dict[Kind, list[Mapping]] = field(default_factory=dict)
    #: Possible page-table bytes by card, and their maximum: UVM returns a chunk of 2 MiB to the card only when no table
    #: lies in it.
    tables: Counter[bytes] = field(default_factory=Counter, compare=False)
    most_tables: Counter[bytes] = field(default_factory=Counter, compare=False)
    #: During a walk, the pieces of mappings that were split: they may lie before those that were not reached yet.
    _pieces: list[Mapping] | None = field(default=None, compare=False)

    @property
    def mappings(self) -> list[Mapping]:
        """List the mappings."""
        return [*chain.from_iterable(self.by_kind.values())]

    def add(self, mapping: Mapping, *, is_piece: bool = False) -> bool:
        """Add a mapping, or a piece of one that was split; False if it is there already."""
        if is_piece and self._pieces is not None:
            self._pieces.append(mapping)
        if self.has(mapping):
            return False
        insort(self.by_kind.setdefault(_kind(mapping), []), mapping)
        return True

    def has(self, mapping: Mapping) -> bool:
        """Tell whether a mapping is there."""
        like = self.by_kind.get(_kind(mapping), [])
        at = bisect_left(like, mapping)
        return like[at : at + 1] == [mapping]

    def remove(self, gone: Iterable[Mapping]) -> list[Mapping]:
        """Remove mappings, and return those that were there."""
        found: dict[Kind, list[Mapping]] = {}
        for each in gone:
            if self.has(each):
                found.setdefault(_kind(each), []).append(each)
        for kind, some in found.items():
            like = self.by_kind[kind]
            if len(some) > _FEW:  # one by one would take too long
                out, reach = set(some), slice(bisect_left(like, min(some)), bisect_right(like, max(some)))
                like[reach] = [each for each in like[reach] if each not in out]
            else:
                for each in some:
                    del like[bisect_left(like, each)]
            if not like:
                del self.by_kind[kind]
        return [*chain.from_iterable(found.values())]

    def take(self, base: int, end: int, uuid: bytes | None, *, whole: bool) -> list[Mapping]:
        """Remove and return mappings that reach into a range, for one card or for all; any, or only ``whole`` ones."""
        gone: list[Mapping] = []
        for kind, place in self._places(base, end, uuid):
            left: list[Mapping] = []
            for each in self.by_kind[kind][place]:
                out = each.end > base and not (whole and (each.base < base or each.end > end))
                (gone if out else left).append(each)
            self.by_kind[kind][place] = left
            if not self.by_kind[kind]:
                del self.by_kind[kind]
        return gone

    def following(self, last: Mapping | None, most: int) -> list[Mapping]:
        """List mappings of one kind that follow another one, or the first ones: ``most`` or fewer, none at the end."""
        if last is not None and (like := self.by_kind.get(_kind(last))) is not None:
            at = bisect_right(like, last)
            if reach := like[at : at + most]:
                return reach
        later = [kind for kind in self.by_kind if last is None or kind > _kind(last)]
        return self.by_kind[min(later)][:most] if later else []

    def _places(self, base: int, end: int, uuid: bytes | None = None) -> list[tuple[Kind, slice]]:
        """Return the slices with all mappings that reach into a range, and few others; for one card or for all."""
        return [
            (kind, slice(bisect_left(like, (base - (1 << kind[1]),)), bisect_left(like, (end,))))
            for kind, like in self.by_kind.items()
            if uuid in (None, kind[0])
        ]

    def reaching_into(self, base: int, end: int) -> list[Mapping]:
        """List all mappings that reach into a range, and a few others."""
        return [*chain.from_iterable(self.by_kind[kind][place] for kind, place in self._places(base, end))]

    def count_overlaps(self, base: int, end: int, most: int) -> int:
        """Return how many mappings reach into a range; count no further than ``most``."""
        reaching = (
            True
            for kind, place in self._places(base, end)
            for at in range(place.start, place.stop)
            if self.by_kind[kind][at].end > base
        )
        return sum(islice(reaching, most))

    def walk(self) -> Iterator[Mapping]:
        """Yield the mappings, while mappings may come, go or be split; one that comes meanwhile may be left out."""
        self._pieces = []
        last: Mapping | None = None
        while found := self._pieces or self.following(last, 1):
            each, is_piece = found.pop(), found is self._pieces
            last = last if is_piece else each
            if not is_piece or self.has(each):
                yield each
        self._pieces = None

    def more_tables(self, uuid: bytes, base: int, length: int) -> int:
        """Return how many more bytes page tables on a card may take with one more mapping."""
        return max(0, self.tables[uuid] + table_bytes(base, length) - self.most_tables[uuid])


def _kind(mapping: Mapping) -> Kind:
    return mapping.uuid, (mapping.end - mapping.base).bit_length()
