"""Makes and frees a pod's OS events: RM keeps them by client and number in one list, and asks nobody whose they are.

So a process could free a neighbour's events, which then waits for ever, or take their numbers first. RM walks the list
under a spinlock, so a pod may have only so many.
"""

from __future__ import annotations

import struct

from qgpu.guardian.proxy import client_ownership
from qgpu.guardian.proxy.handler_context import Handler, HandlerContext, PodCall, status_of
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.guardian.rules import escapes
from qgpu.nvidia import abi

_FIELDS = struct.Struct("<III")  # client, device, number
_STATUS_AT = abi.offsetof("nv_ioctl_os_event_t", "Status")
#: A CUDA process has about thirty.
_MOST_EVENTS = 1 << 12
TOO_MANY = "too many OS events"


class OsEvents(Handler):
    """Handles the two calls for OS events."""

    def __init__(self, ctx: HandlerContext) -> None:
        super().__init__(ctx)
        #: Numbers by client. A file that is closed leaves some behind, until its client is forgotten.
        self._made: dict[int, set[int]] = {}

    def handle(self, pod_call: PodCall, number: int, block: IoctlBuffer) -> int:
        """Make or free an event of one of the pod's own clients."""
        client, _, event = _FIELDS.unpack_from(block.data)
        if number == abi.NV_ESC_FREE_OS_EVENT and client not in self._shared.table.clients:
            return self._ctx.answer(block, _STATUS_AT, abi.NV_ERR_INVALID_CLIENT)  # its events went with it
        if not self._shared.owns(self._pod, client):
            what = client_ownership.name(escapes.name(number))
            return self._ctx.refuse(block, _STATUS_AT, abi.NV_ERR_INVALID_CLIENT, what)
        makes = number == abi.NV_ESC_ALLOC_OS_EVENT
        if makes and not self._has_room():
            return self._ctx.refuse(block, _STATUS_AT, abi.NV_ERR_INSUFFICIENT_RESOURCES, TOO_MANY)
        pod_call.begin()
        if error := self._proxy.escape(pod_call.file, number, block):
            return error
        if status_of(block, _STATUS_AT) == abi.NV_OK:
            events = self._made.setdefault(client, set())
            (events.add if makes else events.discard)(event)
        block.store()
        return 0

    def _has_room(self) -> bool:
        """Tell whether the pod may have another event; forget those of clients that are gone."""
        if sum(map(len, self._made.values())) < _MOST_EVENTS:
            return True
        self._made = {client: events for client, events in self._made.items() if self._shared.owns(self._pod, client)}
        return sum(map(len, self._made.values())) < _MOST_EVENTS
