"""One pod's mappings that could become managed memory: charged before they are made (docs/decisions/0008)."""

from __future__ import annotations

import errno
import os
import time

from qgpu.guardian.accounting import managed_memory
from qgpu.guardian.proxy.handler_context import PROCEED, Handler, HandlerContext
from qgpu.guardian.proxy.seccomp_filter import MAP_FIXED, mapping
from qgpu.linux import proc
from qgpu.linux.inflight_syscalls import InflightSyscalls
from qgpu.linux.seccomp_notify import Notification

#: How long a process that joins UVM waits for a mapping in progress.
_PATIENCE_S, _LOOK_S = 0.02, 0.001


class MmapHandler(Handler):
    """Checks mappings, and knows which of them the kernel is making."""

    def __init__(self, ctx: HandlerContext) -> None:
        super().__init__(ctx)
        self._making = InflightSyscalls()
        #: Mappings may have been made that nobody is charged for: while the pod did not use UVM, or by leave of a dead
        #: guardian.
        self._unseen = False
        self._discharges = 0
        ctx.rescan_mappings = self._rescan

    def next_call(self, tid: int, pid: int) -> None:
        """Record that a thread makes its next call: its last mapping is finished and visible in /proc."""
        if (done := self._making.remove(tid)) is not None and done.size:
            self._shared.quota.rescan_mappings(pid, done.size)

    def charge_made(self) -> bool:
        """Charge the pod for all that it maps, once no mapping is in progress; False if that is not known in time."""
        until = time.monotonic() + _PATIENCE_S
        self._settle()
        while self._making.calls and time.monotonic() < until:
            time.sleep(_LOOK_S)
            self._settle()
        return not self._making.calls and self.charge_unseen()

    def charge_unseen(self) -> bool:
        """Charge all mappings that nobody may be charged for; False if not all could be seen."""
        if self._pod in self._shared.listeners.inherited:
            self._shared.listeners.inherited.discard(self._pod)
            self._unseen = True
        if self._unseen:
            self._unseen = not self._shared.quota.search.charge_all(self._pod)
        return not self._unseen

    def _settle(self) -> None:
        """Read what the pod's processes map now that are charged, or were making mappings."""
        quota = self._shared.quota
        for pid in quota.mappings_of(self._pod):
            quota.rescan_mappings(pid)
        for done in self._making.take_done(_PATIENCE_S):
            quota.rescan_mappings(done.pid, done.size)

    def _rescan(self) -> bool:
        """Read what the pod's processes map now; True if this or another thread has discharged anything since."""
        self._settle()
        search = self._shared.quota.search
        search.clear(self._pod)
        before, self._discharges = self._discharges, search.discharges[self._pod]
        return self._discharges != before

    def handle(self, call: Notification, pid: int) -> int:
        """Check a mapping that could become managed memory (docs/decisions/0008).

        CUDA reports EPERM as "not permitted" and goes on. It reports ENOMEM as an unknown error. No errno makes it
        report out of memory.
        """
        limited = self._ctx.limited()
        if not limited or not self._shared.quota.uses_uvm(self._pod):
            self._unseen = True
            if limited:
                self._add(call, pid)
            return PROCEED
        fd, size = mapping(call)
        cost = managed_memory.cost_of(call.arguments[0] if call.arguments[3] & MAP_FIXED else None, size)
        seen = not self._unseen or self.charge_made()
        fits = seen and self._shared.quota.reserve_mapping(self._pod, pid, cost)
        if seen and not fits and self._ctx.rescan_mappings():
            fits = self._shared.quota.reserve_mapping(self._pod, pid, cost)
        if not fits:
            self._count("managed memory over the limit")
            return errno.EPERM if self._is_uvm(pid, fd) else errno.ENOMEM
        self._shared.quota.will_use_uvm(pid)
        self._add(call, pid, cost)
        return PROCEED

    def _add(self, call: Notification, pid: int, cost: int = 0) -> None:
        for done in self._making.add(call, pid, cost):
            self._shared.quota.rescan_mappings(done.pid, done.size)

    def _is_uvm(self, pid: int, fd: int) -> bool:
        device = proc.device(pid, fd)
        return device is not None and os.major(device) == self._shared.uvm_major
