"""One pod's second handles: duplicates of objects, and what an import brings back.

Only objects of the pod's own are duplicated; another pod's come by descriptor. Memory of a known allocation is charged
once. Of gated objects, only a TSG can have a second handle: a client of an MPS server makes its channels in the
server's TSG.

A copy of an object of the NVLink fabric keeps all memory below it (mem_fabric.c), and RM tells only how much of it the
object shows. So a copy by handle must be of an object over known memory, and no descriptor carries an object that shows
only a part (``check_exports``). One that came by descriptor stays charged until its pod has ended, because no figure of
RM's shows when memory of another pod is gone.

A multicast object keeps the memory attached to it up to branch 565, and nobody says how much. Its memory stays charged
while its pod has a process or a client (``allocations.py``), so under a limit the object stays in the pod's clients.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from itertools import islice

from qgpu.guardian.accounting.allocations import Allocation
from qgpu.guardian.accounting.client_entries import IMPORTED
from qgpu.guardian.accounting.object_tree import OWN_BOUNDS
from qgpu.guardian.accounting.rm_object import Key, RmObject
from qgpu.guardian.proxy import rm_calls
from qgpu.guardian.proxy.alloc_checks import OTHER_SPACE, AllocChecks
from qgpu.guardian.proxy.client_registry import of_others
from qgpu.guardian.proxy.free_calls import FreeHandler
from qgpu.guardian.proxy.handler_context import Handler, HandlerContext, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.guardian.proxy.rm_share import SHARED_PAGE, RmShare
from qgpu.guardian.rules import classes
from qgpu.nvidia import abi

#: An import is compared with at most so many exports of its size, which are looked for among so many of the newest. One
#: that is not found is charged again.
_MOST_COMPARED, _MOST_LOOKED_AT = 64, 1024
#: How many address spaces a client may have that gets another handle of a TSG; a client of MPS has one or two. RM ties
#: the handle to one of them at most, and the free of any of them opens gates.
_MOST_SPACES = 16
#: Refusals of objects of the fabric: copies that cannot be charged, and exports of which an import could not be.
UNKNOWN_ON_FABRIC = "object of the fabric over unknown memory"
PART_ON_FABRIC = "object of the fabric over a part of memory"
_SECOND_HANDLE = "second handle"
#: Objects whose card is that of what their handle lies below: so it is with duplicates.
_ON_ONE_CARD = frozenset({abi.FERMI_VASPACE_A, abi.KEPLER_CHANNEL_GROUP_A})
#: The refusal of an export of which RM would tell importers another card than the memory's.
ELSEWHERE = "export below another card than the memory's"
#: The refusal of what would keep memory attached to a multicast object beyond the end of the pod that pays for it.
MULTICAST = "multicast object for another process"


class DupHandler(Handler):
    """Handles calls that give an object another handle."""

    def __init__(self, ctx: HandlerContext, free_handler: FreeHandler, rm_share: RmShare) -> None:
        super().__init__(ctx)
        self._checks, self._free_handler, self._rm_share = AllocChecks(ctx), free_handler, rm_share

    def dup(self, pod_call: PodCall, block: IoctlBuffer, asked: rm_calls.Dup) -> int:
        """Duplicate an object, or refuse it."""
        source_key = asked.source_client, asked.source
        source = self._shared.table.objects.get(source_key)
        known = self._register(pod_call, asked.client)
        if not self._may_take_from(pod_call, asked.source_client) or asked.source_client in self._ctx.unseen:
            return self._refuse(block, abi.NV_ERR_INSUFFICIENT_PERMISSIONS, of_others("NV_ESC_RM_DUP_OBJECT"))
        if self._rm_share.is_shared_page(source_key):
            return self._refuse(block, abi.NV_ERR_NOT_SUPPORTED, SHARED_PAGE)
        if not known or (source is not None and source.rm_class in classes.GATED and not self._may_share(source)):
            return self._refuse(block, abi.NV_ERR_NOT_SUPPORTED, _SECOND_HANDLE)
        if source is not None and source.rm_class in _ON_ONE_CARD and self._lies_elsewhere(source, asked):
            return self._refuse(block, abi.NV_ERR_INVALID_ARGUMENT, OTHER_SPACE)
        self._free_handler.undo_interrupted(pod_call, (asked.client, asked.handle))
        if refusal := self._shared.claims.vacate((asked.client, asked.handle)):
            return block.answer(refusal)
        if self._is_other_process(asked):
            self._shared.clients.record_unrestorable(asked.client, IMPORTED)
        if source is not None and source.rm_class in classes.GATED:
            return self._share_tsg(pod_call, block, asked, source)
        with self._shared.pod_lock(self._pod):
            before = self._shared.quota.number_of(source_key)
            error = self._perform(pod_call, block, asked)
        if error or block.status != abi.NV_OK:
            block.store()
            return error
        handle = block.u32(8)
        same = self._shared.table.objects.get(source_key) is source
        number = before if same and self._shared.quota.number_of(source_key) == before else None
        parent = asked.parent or asked.client
        if status := self.admit_handle(pod_call, (asked.client, handle), parent, number, source=source_key):
            return block.answer(status)
        block.store()
        return 0

    def _perform(self, pod_call: PodCall, block: IoctlBuffer, asked: rm_calls.Dup) -> int:
        pod_call.begin()
        with self._rm_share.meanwhile((asked.source_client, asked.source), asked.client):
            return self._proxy.escape(pod_call.file, abi.NV_ESC_RM_DUP_OBJECT, block)

    def _may_take_from(self, pod_call: PodCall, client: int) -> bool:
        """Tell whether a client is this pod's, or an unknown one on the call's own file.

        Handles can be guessed. RM would give away what another pod shares with all, as CUDA IPC does, and anything that
        was made by a process whose number this one has.
        """
        entry = self._shared.table.clients.get(client)
        if entry is None:
            return self._gpu_ops.reaches(pod_call.file, client)
        return entry.pod == self._pod

    def _is_other_process(self, asked: rm_calls.Dup) -> bool:
        source, own = (self._shared.table.clients.get(client) for client in (asked.source_client, asked.client))
        return source is None or own is None or source.maker != own.maker

    def _lies_elsewhere(self, source: RmObject, asked: rm_calls.Dup) -> bool:
        """Tell whether a duplicate may lie on another card than its original.

        UVM would then take an address space for one of that card (nvGpuOpsDupAddressSpace), and channels below a TSG
        would name that card's memory.
        """
        card = self._shared.table.instance_of(source)
        return card is None or self._card_of((asked.client, asked.parent)) != card

    def _may_share(self, source: RmObject) -> bool:
        own = self._shared.clients.owns(self._pod, source.client)
        return own and source.confirmed and source.rm_class == abi.KEPLER_CHANNEL_GROUP_A

    def _share_tsg(self, pod_call: PodCall, block: IoctlBuffer, asked: rm_calls.Dup, source: RmObject) -> int:
        """Give a TSG another handle, whose channels are gated with it.

        RM frees the handle with the TSG's address space, if the client has that now (kchangrpapiCopyConstruct_IMPL).
        """
        rm = RmObject(asked.client, asked.handle, asked.parent, source.rm_class, source.detail, same_as=source.key)
        with self._shared.lock:
            rm.uses = tuple(self._shared.table.others(abi.FERMI_VASPACE_A).of(asked.client))
        if len(rm.uses) > _MOST_SPACES:
            return self._refuse(block, abi.NV_ERR_INSUFFICIENT_RESOURCES, _SECOND_HANDLE)
        if refusal := self._checks.admit(pod_call.pid, rm) or self._ctx.claim(rm):
            return block.answer(refusal)
        error = self._perform(pod_call, block, asked)
        if error or block.status != abi.NV_OK:
            self._shared.claims.cancel(rm.key)
        elif not self._shared.claims.confirm(rm.key):
            self._free_handler.discard(pod_call, rm.key)
            return block.answer(abi.NV_ERR_INSUFFICIENT_RESOURCES)
        block.store()
        return error

    def admit_handle(
        self,
        pod_call: PodCall,
        key: Key,
        parent: int,
        number: int | None,
        card: int | None = None,
        *,
        source: Key | None = None,
    ) -> int:
        """Charge what RM put under a new handle; free it if it cannot stay. Return a status.

        ``number`` is the pod's own allocation that it is a handle of, and ``card`` where RM says that imported memory
        lies; None if that is unknown. ``source`` is what was duplicated; None for an import.
        """
        file, is_import = pod_call.file, source is None
        about = self._gpu_ops.object_info(file, *key)
        if about is None:
            return abi.NV_OK
        if about[0] == abi.RM_USER_SHARED_DATA:
            return self._discard(pod_call, key, SHARED_PAGE)
        # Its page tables are charged by handle. Nobody knows the card of one that another program made.
        space = about[0] == abi.FERMI_VASPACE_A and (self._ctx.limited() or source not in self._shared.table.objects)
        if space or about[0] in classes.MADE_FOR_CHANNELS | classes.PHYSICAL:
            return self._discard(pod_call, key, _SECOND_HANDLE)
        if self._keeps_memory(about[0]) and is_import and self._ctx.limited():
            return self._discard(pod_call, key, MULTICAST)
        if about[0] not in OWN_BOUNDS:
            if refusal := self._untracked.refusal(*key, about[0]):
                self._free_handler.discard(pod_call, key)
                return refusal
            if about[0] in classes.KEPT:
                return self._record(pod_call, RmObject(*key, about[1] or parent, about[0], 0), None)
            elsewhere = about[0] == abi.NV01_MEMORY_SYSTEM and not self._is_made_for_card(source, (key[0], about[1]))
            self._untracked.add(*key, about[0], 0 if elsewhere else None)
            return abi.NV_OK
        on_fabric = about[0] == abi.NV_MEMORY_FABRIC
        rm = RmObject(*key, about[1] or parent, about[0], 0)
        if not on_fabric:
            rm.detail = self._gpu_ops.size_by_file(file, *key)
            if not rm.detail and number is None:  # nobody can say what it takes
                self._free_handler.discard(pod_call, key)
                return abi.NV_ERR_INVALID_STATE
        elif number is None:
            if not (size := self._bytes_below(file, rm, is_import=is_import)):
                return self._discard(pod_call, key, UNKNOWN_ON_FABRIC)
            rm.detail = size
        if number is None:
            number = self._find_exported(file, rm)
            if number is None and (refusal := self._place(pod_call, rm, card)):
                return refusal
        if on_fabric and number is not None:
            rm.detail = 0
        status = self._record(pod_call, rm, number)
        if status == abi.NV_OK and rm.detail and on_fabric and self._ctx.limited():
            self._shared.quota.pin_handles(key[0], [key[1]])
        return status

    def _place(self, pod_call: PodCall, rm: RmObject, card: int | None) -> int:
        """Find out to which card memory from outside the pod counts: what it lies below may be on another one."""
        rm.card = self._shared.table.instance_of(rm)
        if card is None or not self._ctx.limited():
            return abi.NV_OK
        rm.card = self._shared.allowance(self._pod).place_on(card)
        return self._discard(pod_call, rm.key, "card without a grant") if rm.card is None else abi.NV_OK

    def _record(self, pod_call: PodCall, rm: RmObject, number: int | None) -> int:
        """Enter what RM has made in the object table; free it if it does not fit. Return a status."""
        status = self._ctx.claim(rm, number)
        if status == abi.NV_OK and not self._shared.claims.confirm(rm.key):
            status = abi.NV_ERR_INSUFFICIENT_RESOURCES
        if status != abi.NV_OK:
            self._free_handler.discard(pod_call, rm.key)
        return status

    def _discard(self, pod_call: PodCall, key: Key, what: str) -> int:
        """Free what may not stay, and count the refusal; return its status."""
        self._free_handler.discard(pod_call, key)
        self._count(what)
        return abi.NV_ERR_NOT_SUPPORTED

    def _bytes_below(self, file: int, rm: RmObject, *, is_import: bool) -> int:
        """Return how much memory an object of the fabric keeps that a descriptor carried; 0 if nobody can say.

        No descriptor carries one that shows only a part. Of a copy by handle that is not known. Without a limit it does
        not matter.
        """
        if (info := self._gpu_ops.fabric_info(file, *rm.key)) is None:
            return 0
        size, flags = info
        if self._ctx.limited() and (flags & abi.NV00F8_ALLOC_FLAGS_FLEXIBLE_FLA or not is_import):
            return 0
        return size

    def check_exports(self, file: int, client: int, handles: Iterable[int], device: int) -> None:
        """Raise OSError if a handle is an object of the fabric over a part of memory, or if RM does not say.

        Also if it is a multicast object that stays in the pod's clients, or of the page that RM shares with all, or if
        RM would tell importers of another card than the memory's: that of the ``device``, or of what it lies below. RM
        keeps a duplicate of what is exported. So a TSG would keep its buffers, uncharged, and a space its page tables.
        """
        table, free = self._shared.table, self._shared.clients.owns(self._pod, client) and not self._ctx.limited()
        for handle in handles:
            about = self._gpu_ops.object_info(file, client, handle)
            rm_class = about[0] if about is not None else None  # None: RM refuses it
            if rm_class == abi.RM_USER_SHARED_DATA:
                raise OSError(errno.ENOTSUP, SHARED_PAGE)
            if rm_class == abi.FERMI_VASPACE_A:
                raise OSError(errno.ENOTSUP, OTHER_SPACE)
            if rm_class in classes.MADE_FOR_CHANNELS:
                raise OSError(errno.ENOTSUP, _SECOND_HANDLE)
            if rm_class is not None and self._keeps_memory(rm_class) and not free:
                raise OSError(errno.ENOTSUP, MULTICAST)
            with self._shared.lock:
                memory = table.allocations.by_handle.get((client, handle))
                on_fabric = table.is_on_fabric((client, handle))
            if memory is None:
                continue
            if {self._card_of((client, each)) for each in (handle, device)} != {memory.instance}:
                raise OSError(errno.ENOTSUP, ELSEWHERE)
            if on_fabric:
                info = self._gpu_ops.fabric_info(file, client, handle)
                if info is None or info[0] < memory.size:
                    raise OSError(errno.ENOTSUP, PART_ON_FABRIC)

    def _is_made_for_card(self, source: Key | None, parent: Key) -> bool:
        """Tell whether the original of host memory was made for the card of what its duplicate lies below."""
        entry = self._shared.table.clients.get(source[0]) if source is not None else None
        if source is None or entry is None or source[1] in entry.memory_of:
            return False
        found, card = self._gpu_ops.find_object(RmObject(*source, 0, abi.NV01_MEMORY_SYSTEM)), self._card_of(parent)
        return found is not None and card is not None and self._card_of((source[0], found[1])) == card

    def _keeps_memory(self, rm_class: int) -> bool:
        return rm_class == abi.NV_MEMORY_MULTICAST_FABRIC and self._shared.multicast_keeps

    def _card_of(self, key: Key) -> int | None:
        rm = self._shared.table.objects.get(key)
        return self._shared.table.instance_of(rm) if rm is not None else None

    def _find_exported(self, file: int, rm: RmObject) -> int | None:
        """Find which of the pod's own allocations a descriptor brought back, by RM's comparison; None if it is none."""
        on_fabric = rm.rm_class == abi.NV_MEMORY_FABRIC
        with self._shared.lock:
            # A program gives an object of the fabric a handle below the card that it is mapped on.
            at = self._shared.table.instance_of(rm)
            cards = sorted(self._shared.allowance(self._pod).minors, key=lambda card: card != at)
            mine = [
                memory
                for card in cards
                for memory in self._shared.table.exported(self._pod, card, rm.detail, _MOST_LOOKED_AT)[:_MOST_COMPARED]
            ]
            handles = [(memory.number, key) for memory in mine for key in self._comparable(memory, on_fabric=on_fabric)]
        for number, other in handles[:_MOST_COMPARED]:
            if self._gpu_ops.is_same(file, rm.key, rm.parent, other):
                return number
        return None

    def _comparable(self, memory: Allocation, *, on_fabric: bool) -> list[Key]:
        """List handles of memory with which RM can compare an import: any of its own, or each object of the fabric."""
        keys = (each for each in memory.handles if self._shared.table.is_on_fabric(each) == on_fabric)
        return list(islice(keys, _MOST_COMPARED if on_fabric else 1))
