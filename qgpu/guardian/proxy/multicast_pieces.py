"""Bounds the pieces of memory that a pod attaches to multicast objects: RM holds its lock while it detaches them all.

They count with a client's mappings for the card (``dma_mappings.py``), as which RM keeps them from 570 on. Before
that it duplicates the memory for each, so they stay when the pod frees it. A program attaches a few to each object.
"""

from __future__ import annotations

import struct

from qgpu.guardian.accounting.rm_object import NO_INSTANCE
from qgpu.guardian.proxy.dma_mappings import DmaMappings, Place
from qgpu.guardian.proxy.handler_context import Handler, HandlerContext
from qgpu.guardian.proxy.rm_calls import Control

#: NV00FD_CTRL_ATTACH_MEM_PARAMS: memory, offset in the object and bytes; DETACH_MEM_PARAMS: subdevice and offset.
_ATTACHED, _DETACHED = struct.Struct("<4xIQ8xQ"), struct.Struct("<I4xQ")


class MulticastPieces(Handler):
    """Counts one pod's pieces; an object has one for each card at an offset."""

    def __init__(self, ctx: HandlerContext, mappings: DmaMappings) -> None:
        super().__init__(ctx)
        self._mappings = mappings

    def fits(self, client: int) -> bool:
        """Tell whether a client may have one more; count the refusal otherwise."""
        return self._mappings.fits(client)

    def attached(self, asked: Control, params: bytes | bytearray) -> None:
        """Record that RM has attached a piece."""
        memory, offset, length = _ATTACHED.unpack_from(params)
        known = self._shared.table.allocations.by_handle.get((asked.client, memory))
        card = known.instance if known is not None else NO_INSTANCE
        lasts_with = asked.target if self._shared.multicast_keeps else memory
        self._mappings.add(asked.client, Place(card, asked.target, offset), length, lasts_with, lambda: False)

    def detached(self, asked: Control, params: bytes | bytearray) -> None:
        """Record that RM has detached a piece."""
        subdevice, offset = _DETACHED.unpack_from(params)
        known = self._shared.table.objects.get((asked.client, subdevice))
        card = self._shared.table.instance_of(known) if known is not None else None
        place = Place(NO_INSTANCE if card is None else card, asked.target, offset)
        self._mappings.remove(asked.client, place, 0)
