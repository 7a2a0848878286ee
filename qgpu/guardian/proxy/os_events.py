"""Bounds a pod's events, and makes and frees its OS events: RM checks neither their number nor whose they are.

RM keeps OS events by client and number in one list. So a process could free a neighbour's, which then waits for ever,
or take their numbers first. RM walks this list, and a card's list of event objects, under spinlocks; the latter in
every interrupt.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from qgpu.guardian.accounting.rm_object import Key
from qgpu.guardian.proxy.client_registry import of_others
from qgpu.guardian.proxy.handler_context import Handler, HandlerContext, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.guardian.rules import escapes
from qgpu.nvidia import abi

#: Of OS events, and of event objects. A CUDA process has about ten of each.
_MOST_EVENTS = 1 << 11
TOO_MANY = "too many events"
#: The kinds of events; the last are those that semaphore surfaces make for a channel.
_OS_EVENTS, EVENT_OBJECTS, OF_SURFACES = "os", "object", "surface"


class PodEvents:
    """A pod's events of one kind, by client and number. The guardian's successor knows them, because RM keeps them.

    RM also frees events with what they belong to. So some of these may be gone, which ``exists`` tells.
    """

    def __init__(self, ctx: HandlerContext, kind: str, exists: Callable[[Key], bool]) -> None:
        self._shared, self._pod, self._kind, self._exists = ctx.shared, ctx.pod, kind, exists

    def has_room(self) -> bool:
        """Tell whether the pod may have another one; forget those that are gone before saying no."""
        if len(self._known) >= _MOST_EVENTS:
            for key in [key for key in self._known if not self._exists(key)]:
                self.discard(*key)
        return len(self._known) < _MOST_EVENTS

    def add(self, client: int, number: int) -> None:
        """Record a new one."""
        self._note(client, number, there=True)

    def discard(self, client: int, number: int) -> None:
        """Record that one is gone, if it is an event."""
        if (client, number) in self._known:
            self._note(client, number, there=False)

    @property
    def _known(self) -> Set[Key]:
        return self._shared.table.events(self._pod, self._kind)

    def _note(self, client: int, number: int, *, there: bool) -> None:
        fact = {"fact": "event", "pod": self._pod, "kind": self._kind, "client": client, "number": number}
        self._shared.note(fact | {"there": there})


class OsEvents(Handler):
    """Handles the two calls for OS events."""

    def __init__(self, ctx: HandlerContext) -> None:
        super().__init__(ctx)
        self._made = PodEvents(ctx, _OS_EVENTS, self._exists)

    def handle(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Make or free an event of one of the pod's own clients."""
        number = pod_call.escape.number
        asked = block.view("nv_ioctl_os_event_t", "Status")
        client, event = asked.hClient, asked.fd
        makes = number == abi.NV_ESC_ALLOC_OS_EVENT
        if makes and client not in self._shared.table.clients:
            self._register(pod_call, client)
        if not makes and client not in self._shared.table.clients:
            return block.answer(abi.NV_ERR_INVALID_CLIENT)  # its events went with it
        if not self._shared.clients.owns(self._pod, client):
            return self._refuse(block, abi.NV_ERR_INVALID_CLIENT, of_others(escapes.name(number)))
        if makes and not self._made.has_room():
            return self._refuse(block, abi.NV_ERR_INSUFFICIENT_RESOURCES, TOO_MANY)
        if makes and pod_call.is_retry:  # it may exist already, and RM makes no second one
            self._gpu_ops.free_os_event(client, event)
        pod_call.begin()
        if error := self._proxy.escape(pod_call.file, number, block):
            return error
        if pod_call.is_retry and not makes:  # the dead guardian may have freed it
            block.status = abi.NV_OK
        if block.status == abi.NV_OK:
            (self._made.add if makes else self._made.discard)(client, event)
        block.store()
        return 0

    def _exists(self, key: Key) -> bool:
        """Tell whether RM may have an event.

        With a client that ends by itself RM does not free its events while the file is open on which they were made.
        """
        client, number = key
        if self._shared.clients.owns(self._pod, client) or self._gpu_ops.has_client(client):
            return True
        self._gpu_ops.free_os_event(client, number)
        return False
