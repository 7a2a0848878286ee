"""Attaches cards to a pod's control file: the driver attaches any card of the host, whatever device nodes there are."""

from __future__ import annotations

import errno

from qgpu.guardian.proxy.handler_context import Handler, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.nvidia import abi

_WORD = 4


class AttachedGpus(Handler):
    """Handles the call that attaches cards by RM's GPU ids, of which it names as many as fit."""

    def attach(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Attach the pod's own cards; the driver has no status in this call."""
        if len(block.data) % _WORD:
            return errno.EINVAL
        named = set(memoryview(block.data).cast("I")) - {0}
        if not named <= self._gpu_ops.gpu_ids(self._shared.allowance(self._pod).minors):
            self._count("card without a grant")
            return errno.EPERM
        error = self._ctx.perform(pod_call, abi.NV_ESC_ATTACH_GPUS_TO_FD, block)
        return 0 if pod_call.is_retry and error == errno.EINVAL else error  # the driver attaches once
