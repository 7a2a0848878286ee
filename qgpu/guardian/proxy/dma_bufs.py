"""Exports a pod's memory as a dma-buf, for other devices such as network cards.

RM takes the memory from the client that the call names, whoever calls. So the guardian makes the call, for the pod's
own clients, and gives the descriptor to the pod. A dma-buf keeps memory without a handle: a pod with a memory limit
gets none.
"""

from __future__ import annotations

import errno
import os
import struct

from qgpu.guardian.proxy.client_registry import of_others
from qgpu.guardian.proxy.handler_context import Handler, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.guardian.rules import escapes
from qgpu.nvidia import abi

_FIELDS = struct.Struct("<iI")  # descriptor (-1: make one), client
#: RM's status, and four bytes of padding, end the structure of every driver branch.
_STATUS_FROM_END = 8


class DmaBufs(Handler):
    """Handles exports of memory as a dma-buf."""

    def export(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Make a dma-buf of the pod's memory, or add memory to one that the pod names."""
        fd, client = _FIELDS.unpack_from(block.data)
        number, block.status_at = pod_call.escape.number, len(block.data) - _STATUS_FROM_END
        if not self._shared.clients.owns(self._pod, client) or client in self._ctx.unseen:
            return self._refuse(block, abi.NV_ERR_INVALID_CLIENT, of_others(escapes.name(number)))
        if fd >= 0:
            return self._ctx.with_descriptor(pod_call, block, 0)
        pod_call.begin_repeatable()  # a successor makes another one; this one ends with its descriptor
        if error := self._proxy.escape(pod_call.file, number, block):
            return error
        made = _FIELDS.unpack_from(block.data)[0]
        if made >= 0 and block.status == abi.NV_OK:
            try:
                theirs = pod_call.listener.add_descriptor(pod_call.call.id, made)
            finally:
                os.close(made)
            if theirs < 0:
                return errno.EMFILE
            block.patch_u32(0, theirs)
        block.store()
        return 0
