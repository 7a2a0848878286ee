"""How many mappings of memory for the card a pod has: RM holds its lock while it undoes all those of what it frees.

RM finds a mapping by the handles of its device and address space and by its offset (rs_server.c:
serverInterUnmapInternal). It removes mappings with their memory and their address space, too. Those are forgotten here
once their offset is used again, or when the pod has its most: then RM is asked what exists.

The journal has the number of each client's mappings, not their places. Of those that a dead guardian made, a successor
takes off its count only what is undone without a size. If the pod undoes a range where the successor knows none, it
counts one more: RM may have split one of them.

With them count the pieces of memory that a pod attaches to multicast objects: RM keeps them so from 570 on. Before that
it duplicates the memory for each, so they stay when the pod frees it. A program attaches a few to each object.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from qgpu.guardian.accounting.client_entries import RmClientEntry
from qgpu.guardian.accounting.rm_object import NO_INSTANCE
from qgpu.guardian.proxy.handler_context import HandlerContext
from qgpu.guardian.proxy.object_claims import TOO_MANY
from qgpu.guardian.proxy.rm_calls import Control

#: How many mappings a client and a pod may have. RM undoes one in 14 µs (H200, ``bench/rm_mappings.py``).
_MOST, _MOST_OF_POD = 1 << 14, 1 << 15
#: NV00FD_CTRL_ATTACH_MEM_PARAMS: memory, offset in the object and bytes; DETACH_MEM_PARAMS: subdevice and offset.
_ATTACHED, _DETACHED = struct.Struct("<4xIQ8xQ"), struct.Struct("<I4xQ")


class Place(NamedTuple):
    """Where a mapping begins: the handles of its device and its address space, and the offset in bytes.

    Of a piece: its card, of which an object has one piece at an offset, and the multicast object's handle.
    """

    device: int
    space: int
    offset: int


@dataclass(slots=True)
class _OfClient:
    """A client's mappings: their places in order, and for each its bytes and the memory's handle."""

    entry: RmClientEntry
    #: Those beside ``places``: a dead guardian made them, or they are further ones at a place.
    others: int
    places: list[Place] = field(default_factory=list)
    mapped: dict[Place, tuple[int, int]] = field(default_factory=dict)

    def number(self) -> int:
        return self.others + len(self.places)

    def is_all(self) -> bool:
        """Tell whether no other pod's handler has counted for the client since."""
        return self.number() == self.entry.dma_mappings

    def add(self, place: Place, length: int, memory: int) -> None:
        if place not in self.mapped:
            insort(self.places, place)
        self.mapped[place] = length, memory

    def overlapping(self, place: Place, size: int) -> list[Place]:
        """List those in a range of so many bytes. None overlap each other, apart from pieces."""
        end = place._replace(offset=place.offset + size)
        found = self.places[max(0, bisect_right(self.places, place) - 1) : bisect_left(self.places, end)]
        return [each for each in found if each[:2] == place[:2] and each.offset + self.mapped[each][0] > place.offset]

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

    def add(self, client: int, place: Place, length: int, memory: int, is_context_dma: Callable[[], bool]) -> None:
        """Record that RM has mapped ``length`` bytes of memory, given its handle.

        In a context DMA RM makes any number of mappings at one place (context_dma.c:ctxdmaMapTo_IMPL); elsewhere what
        was there before is gone.
        """
        if (mine := self._mappings_of(client)) is None:
            return
        if before := mine.overlapping(place, max(1, length)):
            mine.others += len(before) * is_context_dma()
            for each in before:
                mine.remove(each)
        mine.add(place, length, memory)
        self._note(client, mine)

    def may_split(self, client: int, place: Place, size: int) -> bool:
        """Tell whether RM may leave two parts of a mapping when it undoes a range, of so many bytes."""
        if not size or (mine := self._mappings_of(client)) is None:
            return False
        if not (found := mine.overlapping(place, size)):
            return mine.others > 0
        first = found[0].offset
        return first < place.offset and first + mine.mapped[found[0]][0] > place.offset + size

    def remove(self, client: int, place: Place, size: int) -> None:
        """Record that RM has removed the mapping at a place, or with a size in bytes whatever lies in that range."""
        if (mine := self._mappings_of(client)) is None:
            return
        if size:
            if not self._cut(mine, place, size) and mine.others:
                mine.others += 1  # RM may have left two parts of one of these
        elif place in mine.mapped:
            mine.remove(place)
        else:
            mine.others = max(0, mine.others - 1)
        self._note(client, mine)

    def attached(self, asked: Control, params: bytes | bytearray) -> None:
        """Record that RM has attached a piece to a multicast object."""
        memory, offset, length = _ATTACHED.unpack_from(params)
        known = self._shared.table.allocations.by_handle.get((asked.client, memory))
        card = known.instance if known is not None else NO_INSTANCE
        lasts_with = asked.target if self._shared.multicast_keeps else memory
        if (mine := self._mappings_of(asked.client)) is not None:
            mine.add(Place(card, asked.target, offset), length, lasts_with)  # pieces may overlap
            self._note(asked.client, mine)

    def detached(self, asked: Control, params: bytes | bytearray) -> None:
        """Record that RM has detached a piece."""
        subdevice, offset = _DETACHED.unpack_from(params)
        known = self._shared.table.objects.get((asked.client, subdevice))
        card = self._shared.table.instance_of(known) if known is not None else None
        self.remove(asked.client, Place(NO_INSTANCE if card is None else card, asked.target, offset), 0)

    def _cut(self, mine: _OfClient, place: Place, size: int) -> bool:
        """Forget what lies in a range; False if nothing known does."""
        found, end = mine.overlapping(place, size), place._replace(offset=place.offset + size)
        for each in found:
            length, memory = mine.remove(each)
            if each.offset < place.offset:
                mine.add(each, place.offset - each.offset, memory)
            if each.offset + length > end.offset:
                mine.add(end, each.offset + length - end.offset, memory)
        return bool(found)

    def _mappings_of(self, client: int) -> _OfClient | None:
        """Return what is known of a client, only the number if another pod had it; None if it is gone."""
        if (entry := self._shared.table.clients.get(client)) is None:
            return None
        mine = self._of.get(client)
        if mine is None or mine.entry is not entry or not mine.is_all():
            mine = self._of[client] = _OfClient(entry, entry.dma_mappings)
        return mine

    def _note(self, client: int, mine: _OfClient) -> None:
        if mine.entry.dma_mappings != mine.number():
            self._shared.note({"fact": "dma_mappings", "client": client, "count": mine.number()})

    def _has_room(self, client: int) -> bool:
        entries = map(self._shared.table.clients.get, self._shared.table.clients_of(self._pod))
        if sum(entry.dma_mappings for entry in entries if entry is not None) >= _MOST_OF_POD:
            return False
        mine = self._mappings_of(client)
        return mine is None or mine.number() < _MOST

    def _forget_gone(self) -> None:
        known = self._shared.table.clients
        here = {client: mine for client, mine in self._of.items() if known.get(client) is mine.entry and mine.is_all()}
        self._of = {client: mine for client, mine in here.items() if mine.entry.pod == self._pod}
        for client, mine in self._of.items():
            named = {each for place, (_, memory) in mine.mapped.items() for each in (place.space, memory)}
            gone = {each for each in named if not self._shared.gpu_ops.exists((client, each))}
            for place in [place for place, (_, memory) in mine.mapped.items() if gone & {place.space, memory}]:
                mine.remove(place)
            self._note(client, mine)
