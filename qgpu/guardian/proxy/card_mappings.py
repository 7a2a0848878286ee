"""Maps memory into an address space of the card by RM's own calls, for pods without a memory limit.

Memory by physical address could be another pod's. No pod may make any, but one call for memory is the kernel's to
perform (``old_memory_calls.py``), and another thread may change its class meanwhile. So what it made is looked at here,
before the card can reach it.
"""

from __future__ import annotations

import errno
from functools import partial
from typing import Any

from qgpu.guardian.accounting.rm_object import RmObject
from qgpu.guardian.proxy import rm_calls
from qgpu.guardian.proxy.alloc_calls import BEYOND_MEMORY
from qgpu.guardian.proxy.alloc_checks import AllocChecks
from qgpu.guardian.proxy.client_registry import of_others
from qgpu.guardian.proxy.dma_mappings import DmaMappings, Place
from qgpu.guardian.proxy.handler_context import Handler, HandlerContext, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.guardian.proxy.passthrough_memory import UNSEEN
from qgpu.guardian.rules import classes, escapes
from qgpu.nvidia import abi

#: The refusal of addresses of one card for another.
OTHER_CARD = "mapping of another card's memory or address space"
#: RM may look through all mappings of an address space for the one to undo, with the card's lock held.
_LONG_NS = 2 * 10**5
#: NVOS46_FLAGS_P2P_ENABLE, and its value NOSLI: the memory is a peer's.
_P2P, _FROM_PEER = 3 << 20, 2 << 20
#: Memory on the fabric, and memory of the host, for which RM takes the address that the mapping's card has for it
#: (memdescCreateSubMem).
_OF_ANY_CARD = frozenset(
    {
        abi.NV_MEMORY_FABRIC,
        abi.NV_MEMORY_MULTICAST_FABRIC,
        abi.NV01_MEMORY_SYSTEM,
        abi.NV01_MEMORY_SYSTEM_OS_DESCRIPTOR,
    }
)


class CardMappings(Handler):
    """Handles RM's mappings for the card, and context DMAs."""

    def __init__(self, ctx: HandlerContext, mappings: DmaMappings) -> None:
        super().__init__(ctx)
        self._checks, self._mappings = AllocChecks(ctx), mappings

    def map(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Map memory whose class a pod may have."""
        asked = block.view(abi.MAP_MEMORY_DMA[len(block.data)])
        found = self._gpu_ops.object_info(pod_call.file, asked.hClient, asked.hMemory)
        if found is not None and found[0] in {*classes.PHYSICAL, abi.RM_USER_SHARED_DATA}:
            self._count(classes.name(found[0]))
            return errno.EPERM
        owns = self._shared.clients.owns(self._pod, asked.hClient)
        if owns and self._lies_elsewhere(pod_call, asked, found or (0, 0)):
            return self._refuse(block, abi.NV_ERR_INVALID_ARGUMENT, OTHER_CARD)
        if owns and not self._mappings.fits(asked.hClient):
            return block.answer(abi.NV_ERR_INSUFFICIENT_RESOURCES)
        error = self._perform(pod_call, block, asked.hClient)
        if not error and asked.status == abi.NV_OK:
            place = Place(asked.hDevice, asked.hDma, asked.dmaOffset)
            may_be_context_dma = partial(self._may_be_context_dma, pod_call, asked.hClient, asked.hDma)
            self._mappings.add(asked.hClient, place, asked.length, asked.hMemory, may_be_context_dma)
        return error

    def _lies_elsewhere(self, pod_call: PodCall, asked: Any, memory: tuple[int, int]) -> bool:
        """Tell whether RM may put an address on one card into an address space of another, given the memory's info.

        RM maps for the device that the call names, and takes the memory for that card's. Memory of a peer it takes for
        that of the card that its handle lies below (dmaAllocMapping_GM107).
        """
        client, table = asked.hClient, self._shared.table
        space = self._gpu_ops.object_info(pod_call.file, client, asked.hDma) or (0, 0)
        if self._checks.lies_elsewhere(RmObject(client, asked.hDma, space[1], space[0]), asked.hDevice):
            return True
        if memory[0] in _OF_ANY_CARD:
            return False
        from_peer = asked.flags & _P2P == _FROM_PEER
        made = RmObject(client, asked.hMemory, memory[1] if from_peer else asked.hDevice, memory[0])
        if known := table.allocations.behind([(client, asked.hMemory)]):
            return any(each.foreign or each.instance != table.instance_of(made) for each in known)
        entry = table.clients.get(client)
        unsure = entry is not None and not entry.memory_of.get(asked.hMemory, asked.hMemory)
        return unsure or self._checks.lies_elsewhere(made, memory[1])

    def _may_be_context_dma(self, pod_call: PodCall, client: int, handle: int) -> bool:
        found = self._gpu_ops.object_info(pod_call.file, client, handle)
        return found is None or found[0] == abi.NV01_CONTEXT_DMA

    def unmap(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Undo a mapping, or from branch 550 on what lies in a range."""
        asked = block.view(abi.UNMAP_MEMORY_DMA[len(block.data)])
        size, place = getattr(asked, "size", 0), Place(asked.hDevice, asked.hDma, asked.dmaOffset)
        if size and not self._shared.clients.owns(self._pod, asked.hClient):
            return block.answer(abi.NV_ERR_INSUFFICIENT_RESOURCES)
        if self._mappings.may_split(asked.hClient, place, size) and not self._mappings.fits(asked.hClient):
            return block.answer(abi.NV_ERR_INSUFFICIENT_RESOURCES)
        self._ctx.rare.wait()
        with self._ctx.rare.worked(_LONG_NS):
            error = self._ctx.perform(pod_call, block)
        if not error and asked.status == abi.NV_OK:
            self._mappings.remove(asked.hClient, place, size)
        return error

    def context_dma(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Make a context DMA: by this call RM would make an object of any class, with parameters of its own making."""
        asked = block.view("NVOS39_PARAMETERS")
        client = asked.hObjectParent
        if asked.hClass != abi.NV01_CONTEXT_DMA:
            return self._refuse(block, abi.NV_ERR_INVALID_CLASS, classes.name(asked.hClass))
        if not self._is_for_own_card(pod_call, asked) or not rm_calls.holds_notifier(asked.offset, asked.limit):
            return self._refuse(block, abi.NV_ERR_INVALID_ARGUMENT, BEYOND_MEMORY)
        owns = self._shared.clients.owns(self._pod, client)
        if owns and (refusal := self._untracked.refusal(client, asked.hObjectNew, asked.hClass)):
            return block.answer(refusal)
        error = self._perform(pod_call, block, client)
        if not error and asked.status == abi.NV_OK:
            self._untracked.add(client, asked.hObjectNew, asked.hClass, asked.hMemory)
        return error

    def _is_for_own_card(self, pod_call: PodCall, asked: Any) -> bool:
        """Tell whether a context DMA is for its memory's card: RM takes addresses for the subdevice that it names."""
        about = self._gpu_ops.object_info(pod_call.file, asked.hObjectParent, asked.hMemory) or (0, 0)
        made = RmObject(asked.hObjectParent, asked.hObjectNew, about[1], asked.hClass)
        return not (asked.hSubDevice and self._checks.lies_elsewhere(made, asked.hSubDevice))

    def _perform(self, pod_call: PodCall, block: IoctlBuffer, client: int) -> int:
        unseen = client in self._ctx.unseen
        if unseen or not self._shared.clients.owns(self._pod, client):
            self._count(UNSEEN if unseen else of_others(escapes.name(pod_call.escape.number)))
            return errno.EPERM
        return self._ctx.perform(pod_call, block)
