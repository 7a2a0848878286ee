"""Maps memory into an address space of the card by RM's own calls, for pods without a memory limit.

Memory by physical address could be another pod's. No pod may make any, but one call for memory is the kernel's to
perform (``alloc.py``), and another thread may change its class meanwhile. So what it made is looked at here, before the
card can reach it.
"""

from __future__ import annotations

import errno
import struct

from qgpu.guardian.proxy import client_ownership
from qgpu.guardian.proxy.continued_memory import UNSEEN, ContinuedMemory
from qgpu.guardian.proxy.handler_context import Handler, HandlerContext, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.guardian.rules import classes, escapes
from qgpu.nvidia import abi

_FIELDS = struct.Struct("<IIII")  # client, device, address space or context DMA, memory


class CardMappings(Handler):
    """Handles RM's mappings for the card, and context DMAs."""

    def __init__(self, ctx: HandlerContext, continued: ContinuedMemory) -> None:
        super().__init__(ctx)
        self._continued = continued

    def map(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Map memory whose class a pod may have."""
        client, _, _, memory = _FIELDS.unpack_from(block.data)
        found = self._gpu_ops.object_info(pod_call.file, client, memory)
        if found is not None and found[0] in classes.PHYSICAL:
            self._shared.refusals.count(self._pod, classes.name(found[0]))
            return errno.EPERM
        return self._perform(pod_call, abi.NV_ESC_RM_MAP_MEMORY_DMA, block)

    def context_dma(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Make a context DMA: by this call RM would make an object of any class, with parameters of its own making."""
        (rm_class,) = struct.unpack_from("<I", block.data, abi.offsetof("NVOS39_PARAMETERS", "hClass"))
        if rm_class != abi.NV01_CONTEXT_DMA:
            status_at = abi.offsetof("NVOS39_PARAMETERS", "status")
            return self._ctx.refuse(block, status_at, abi.NV_ERR_INVALID_CLASS, classes.name(rm_class))
        return self._perform(pod_call, abi.NV_ESC_RM_ALLOC_CONTEXT_DMA2, block)

    def _perform(self, pod_call: PodCall, number: int, block: IoctlBuffer) -> int:
        client, *_ = _FIELDS.unpack_from(block.data)
        unseen = self._continued.is_unseen(client)
        if unseen or not self._shared.owns(self._pod, client):
            self._shared.refusals.count(self._pod, UNSEEN if unseen else client_ownership.name(escapes.name(number)))
            return errno.EPERM
        pod_call.begin()
        if not (error := self._proxy.escape(pod_call.file, number, block)):
            block.store()
        return error
