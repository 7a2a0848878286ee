"""Maps memory for the CPU where the guardian made the client: RM does it only for the process that made the client.

The mapping belongs to the file that the pod then gives to mmap; the guardian maps nothing. The kernel performs the same
calls for the clients that it made.
"""

from __future__ import annotations

import errno
import struct

from qgpu.guardian.proxy.continued_memory import UNSEEN, ContinuedMemory
from qgpu.guardian.proxy.handler_context import Handler, HandlerContext, PodCall, status_of
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.nvidia import abi

_U32 = struct.Struct("<I")
_DESCRIPTOR_AT = abi.offsetof("NVOS33_PARAMETERS_WITH_FD", "fd")
_STATUS_AT = abi.offsetof("NVOS33_PARAMETERS_WITH_FD", "status")


class CpuMappings(Handler):
    """Handles RM's calls that map memory, unmap it, and tell RM its address."""

    def __init__(self, ctx: HandlerContext, continued: ContinuedMemory) -> None:
        super().__init__(ctx)
        self._continued = continued

    def is_made_here(self, client: int) -> bool:
        """Tell whether the guardian made a client, for this pod."""
        entry = self._shared.table.clients.get(client)
        return entry is not None and entry.pod == self._pod and entry.made_here

    def concerns(self, pod_call: PodCall) -> bool:
        """Tell whether a mapping call names a client that the guardian made; the kernel performs all others."""
        data = self._proxy.memory.read(pod_call.call.tid, pod_call.call.argument, _U32.size)
        return data is not None and self.is_made_here(*_U32.unpack(data))

    def handle(self, pod_call: PodCall, number: int, block: IoctlBuffer) -> int:
        """Perform a mapping call on the pod's own file."""
        (client,) = _U32.unpack_from(block.data)
        if not self.is_made_here(client):
            return errno.EBUSY  # another thread has changed it
        if number == abi.NV_ESC_RM_MAP_MEMORY:
            if self._continued.is_unseen(client):
                return self._ctx.refuse(block, _STATUS_AT, abi.NV_ERR_INSUFFICIENT_PERMISSIONS, UNSEEN)
            error = self._ctx.with_descriptor(pod_call, number, block, _DESCRIPTOR_AT)
            if (status := status_of(block, _STATUS_AT)) != abi.NV_OK:
                self._shared.refusals.count(self._pod, f"mapping by the driver, status {status:#x}")
            return error
        pod_call.begin()
        if not (error := self._proxy.escape(pod_call.file, number, block)):
            block.store()
        return error
