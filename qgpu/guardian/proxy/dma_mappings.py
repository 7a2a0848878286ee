"""How many mappings of memory for the card a pod has: RM holds its lock while it undoes all those of what it frees.

RM finds a mapping by the handles of its device and address space and by its offset (rs_server.c:
serverInterUnmapInternal). It removes mappings with their memory, too. Those are forgotten here once their offset is
used again, or when the pod has its most: then RM is asked which memory exists.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from typing import NamedTuple

from qgpu.guardian.proxy.handler_context import HandlerContext
from qgpu.guardian.proxy.object_claims import TOO_MANY

#: How many mappings a client and a pod may have. RM undoes one in 14 µs (H200, ``bench/rm_mappings.py``).
_MOST, _MOST_OF_POD = 1 << 14, 1 << 15


class Place(NamedTuple):
    """Where a mapping begins: the handles of its device and its address space, and the offset in bytes."""

    device: int
    space: int
    offset: int


@dataclass(slots=True)
class _OfClient:
    """A client's mappings: their places in order, and for each its bytes and the memory's handle."""

    places: list[Place] = field(default_factory=list)
    mapped: dict[Place, tuple[int, int]] = field(default_factory=dict)

    def add(self, place: Place, length: int, memory: int) -> None:
        if place not in self.mapped:
            insort(self.places, place)
        self.mapped[place] = length, memory

    def remove(self, place: Place) -> tuple[int, int]:
        del self.places[bisect_left(self.places, place)]
        return self.mapped.pop(place)


class DmaMappings:
    """A pod's mappings of memory for the card."""

    def __init__(self, ctx: HandlerContext) -> None:
        self._shared, self._pod = ctx.shared, ctx.pod
        self._of: dict[int, _OfClient] = {}

    def fits(self, client: int) -> bool:
        """Tell whether a client may have one more; count the refusal otherwise."""
        if self._has_room(client):
            return True
        self._forget_gone()
        if self._has_room(client):
            return True
        self._shared.refusals.count(self._pod, TOO_MANY)
        return False

    def add(self, client: int, place: Place, length: int, memory: int) -> None:
        """Record that RM has mapped ``length`` bytes of memory, given its handle."""
        self._of.setdefault(client, _OfClient()).add(place, length, memory)

    def remove(self, client: int, place: Place, size: int) -> None:
        """Record that RM has removed the mapping at a place, or with a size in bytes whatever lies in that range."""
        if (mine := self._of.get(client)) is None:
            return
        if not size:
            if place in mine.mapped:
                mine.remove(place)
            return
        end = place._replace(offset=place.offset + size)
        for each in mine.places[max(0, bisect_right(mine.places, place) - 1) : bisect_left(mine.places, end)]:
            length, memory = mine.mapped[each]
            if each[:2] != place[:2] or each.offset + length <= place.offset:
                continue
            mine.remove(each)
            if each.offset < place.offset:
                mine.add(each, place.offset - each.offset, memory)
            if each.offset + length > end.offset:
                mine.add(end, each.offset + length - end.offset, memory)

    def _has_room(self, client: int) -> bool:
        mine = self._of.get(client)
        if mine is not None and len(mine.places) >= _MOST:
            return False
        return sum(len(each.places) for each in self._of.values()) < _MOST_OF_POD

    def _forget_gone(self) -> None:
        """Forget mappings whose client or memory is gone."""
        mine = self._shared.table.clients_of(self._pod)
        self._of = {client: found for client, found in self._of.items() if client in mine}
        for client, found in self._of.items():
            memories = {memory for _, memory in found.mapped.values()}
            gone = {each for each in memories if not self._shared.gpu_ops.exists((client, each))}
            for place in [place for place, (_, memory) in found.mapped.items() if memory in gone]:
                found.remove(place)
