"""Looks at what the kernel made where it continued a pod's RM_ALLOC_MEMORY.

RM pins the caller's own pages, so the kernel performs that call (``alloc.py``). Another thread may change its class
meanwhile, into one that reaches any memory or all registers of the card. So the pod's next call waits until it is over,
and such objects are freed before: no call can name them.
"""

from __future__ import annotations

import errno

from qgpu.guardian.proxy.handler_context import Handler, HandlerContext, PodCall
from qgpu.linux.inflight_syscalls import InflightSyscalls
from qgpu.nvidia import abi

#: The refusal of what was found.
BY_ADDRESS = "memory by its address on the card"
#: How long the pod's other calls wait: to pin a hundred gigabytes takes most of a minute.
_PATIENCE_S = 100.0


class ContinuedMemory(Handler):
    """Follows the calls that the kernel continues, and frees what they may not have made."""

    def __init__(self, ctx: HandlerContext) -> None:
        super().__init__(ctx)
        self._calls = InflightSyscalls()
        self._unseen = True  # a dead guardian may have let one continue

    def begin(self, pod_call: PodCall) -> None:
        """Record a call that the kernel is about to continue."""
        self._calls.add(pod_call.call, pod_call.pid)
        self._unseen = True

    def next_call(self, tid: int) -> None:
        """Record that a thread makes its next call: its last one is over."""
        self._calls.remove(tid)

    def look(self) -> None:
        """Free what no pod may have, if a call may have made it since the last look.

        Raises OSError if such a call is not over.
        """
        if not self._unseen:
            return
        if not self._calls.wait(_PATIENCE_S):
            raise OSError(errno.EBUSY, "a call for memory is not over")
        self._unseen = False
        table = self._shared.table
        for client in table.clients_of(self._pod):
            for device in list(table.devices.get(client, ())):
                if self._gpu_ops.free_children(client, device, abi.CLASS_IDS_BY_ADDRESS):
                    self._shared.refusals.count(self._pod, BY_ADDRESS)
