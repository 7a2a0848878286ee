"""Maps memory into an address space of the card by RM's own calls, for pods without a memory limit.

Memory by physical address could be another pod's. No pod may make any, but one call for memory is the kernel's to
perform (``alloc_memory.py``), and another thread may change its class meanwhile. So what it made is looked at here,
before the card can reach it.
"""

from __future__ import annotations

import errno
import struct

from qgpu.guardian.proxy import client_ownership
from qgpu.guardian.proxy.dma_mappings import DmaMappings, Place
from qgpu.guardian.proxy.handler_context import Handler, HandlerContext, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.guardian.proxy.passthrough_memory import UNSEEN, PassthroughMemory
from qgpu.guardian.proxy.untracked_objects import UntrackedObjects
from qgpu.guardian.rules import classes, escapes
from qgpu.nvidia import abi

_FIELDS = struct.Struct("<IIII")  # client, device, address space or context DMA, memory
#: Of the calls that map and unmap, whose last fields lie at the same distance from the end in every version.
_LENGTH_AT, _OFFSET_BEFORE_END, _STATUS_BEFORE_END = 24, 16, 8
_UNMAP_OFFSET_AT, _UNMAP_SIZE_AT = 24, 32
#: Of the call for context DMAs.
_HANDLE_AT, _STATUS_AT = (abi.offsetof("NVOS39_PARAMETERS", each) for each in ("hObjectNew", "status"))


class CardMappings(Handler):
    """Handles RM's mappings for the card, and context DMAs."""

    def __init__(self, ctx: HandlerContext, passthrough_memory: PassthroughMemory, untracked: UntrackedObjects) -> None:
        super().__init__(ctx)
        self._passthrough_memory, self._untracked_objects = passthrough_memory, untracked
        self._mappings = DmaMappings(ctx)

    def map(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Map memory whose class a pod may have."""
        client, device, space, memory = _FIELDS.unpack_from(block.data)
        status_at = len(block.data) - _STATUS_BEFORE_END
        found = self._gpu_ops.object_info(pod_call.file, client, memory)
        if found is not None and found[0] in classes.PHYSICAL:
            self._count(classes.name(found[0]))
            return errno.EPERM
        if self._shared.clients.owns(self._pod, client) and not self._mappings.fits(client):
            return self._ctx.answer(block, status_at, abi.NV_ERR_INSUFFICIENT_RESOURCES)
        error = self._perform(pod_call, abi.NV_ESC_RM_MAP_MEMORY_DMA, block)
        if not error and block.u32(status_at) == abi.NV_OK:
            place = Place(device, space, block.u64(len(block.data) - _OFFSET_BEFORE_END))
            length = block.u64(_LENGTH_AT)
            self._mappings.add(client, place, length, memory, lambda: self._may_be_context_dma(pod_call, client, space))
        return error

    def _may_be_context_dma(self, pod_call: PodCall, client: int, handle: int) -> bool:
        found = self._gpu_ops.object_info(pod_call.file, client, handle)
        return found is None or found[0] == abi.NV01_CONTEXT_DMA

    def unmap(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Undo a mapping, or from branch 550 on what lies in a range."""
        client, device, space, _ = _FIELDS.unpack_from(block.data)
        status_at = len(block.data) - _STATUS_BEFORE_END
        size = block.u64(_UNMAP_SIZE_AT) if status_at > _UNMAP_SIZE_AT else 0
        # Undoing a range may split a mapping in two, so it needs room for one more.
        if size and not (self._shared.clients.owns(self._pod, client) and self._mappings.fits(client)):
            return self._ctx.answer(block, status_at, abi.NV_ERR_INSUFFICIENT_RESOURCES)
        error = self._ctx.perform(pod_call, abi.NV_ESC_RM_UNMAP_MEMORY_DMA, block)
        if not error and block.u32(status_at) == abi.NV_OK:
            self._mappings.remove(client, Place(device, space, block.u64(_UNMAP_OFFSET_AT)), size)
        return error

    def context_dma(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Make a context DMA: by this call RM would make an object of any class, with parameters of its own making."""
        (rm_class,) = struct.unpack_from("<I", block.data, abi.offsetof("NVOS39_PARAMETERS", "hClass"))
        if rm_class != abi.NV01_CONTEXT_DMA:
            return self._ctx.refuse(block, _STATUS_AT, abi.NV_ERR_INVALID_CLASS, classes.name(rm_class))
        client, handle = _FIELDS.unpack_from(block.data)[0], block.u32(_HANDLE_AT)
        owns = self._shared.clients.owns(self._pod, client)
        if owns and (refusal := self._untracked_objects.refusal(client, handle, rm_class)):
            return self._ctx.answer(block, _STATUS_AT, refusal)
        error = self._perform(pod_call, abi.NV_ESC_RM_ALLOC_CONTEXT_DMA2, block)
        if not error and block.u32(_STATUS_AT) == abi.NV_OK:
            self._untracked_objects.add(client, block.u32(_HANDLE_AT), rm_class)
        return error

    def _perform(self, pod_call: PodCall, number: int, block: IoctlBuffer) -> int:
        client, *_ = _FIELDS.unpack_from(block.data)
        unseen = self._passthrough_memory.is_unseen(client)
        if unseen or not self._shared.clients.owns(self._pod, client):
            self._count(UNSEEN if unseen else client_ownership.name(escapes.name(number)))
            return errno.EPERM
        return self._ctx.perform(pod_call, number, block)
