"""Looks at what the kernel made where it continued a pod's RM_ALLOC_MEMORY.

RM pins the caller's own pages, so the kernel performs that call (``alloc.py``). Another thread can change its class
meanwhile, to one that reaches any memory or all registers of the card. So the pod's next call waits until the call is
over. Then the guardian frees such objects, in each client of the pod. A client whose file it cannot find stays unseen:
nothing is duplicated from it, and a call on its file brings the look.
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
        self._continued = True  # a dead guardian may have let one continue
        #: Clients that were not looked at since.
        self._unseen: set[int] = set()

    def begin(self, pod_call: PodCall) -> None:
        """Record a call that the kernel is about to continue."""
        self._calls.add(pod_call.call, pod_call.pid)
        self._continued = True

    def next_call(self, tid: int) -> None:
        """Record that a thread makes its next call: its last one is over."""
        self._calls.remove(tid)

    def is_unseen(self, client: int) -> bool:
        """Tell whether a client may have what no pod may have."""
        return client in self._unseen

    def look(self, file: int | None = None) -> None:
        """Free what no pod may have, before a call on ``file`` of RM's, or on one of UVM's.

        Raises OSError if a call for memory is not over.
        """
        if not self._continued and not self._unseen:
            return
        if self._continued:
            if not self._calls.wait(_PATIENCE_S):
                raise OSError(errno.EBUSY, "a call for memory is not over")
            self._continued = False
            self._unseen = {client for client in self._shared.table.clients_of(self._pod) if not self._is_clean(client)}
        table = self._shared.table
        if file is not None:
            self._unseen = {each for each in self._unseen if each in table.clients and not self._is_clean(each, file)}

    def _is_clean(self, client: int, file: int | None = None) -> bool:
        """Free what a client may not have, through its own file or one of ours; False if that does not reach it."""
        devices = tuple(self._shared.table.devices.get(client, ()))
        found = self._gpu_ops.free_children(client, devices, abi.CLASS_IDS_BY_ADDRESS, file)
        if found:
            self._shared.refusals.count(self._pod, BY_ADDRESS)
        return found is not None
