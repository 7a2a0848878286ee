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
#: From how many processes on those that have ended are looked for among them.
_MANY = 1 << 13


class MmapHandler(Handler):
    """Checks mappings, and knows which of them the kernel is making."""

    def __init__(self, ctx: HandlerContext) -> None:
        super().__init__(ctx)
        self._making = InflightSyscalls()
        #: Processes that made mappings while the pod did not use UVM; a dead guardian may have let any process do so.
        self._unchecked = set(self._shared.table.pids_of(self._pod))
        ctx.rescan_mappings = self._rescan

    def next_call(self, tid: int, pid: int) -> None:
        """Record that a thread makes its next call: its last mapping is finished and visible in /proc."""
        if (over := self._making.remove(tid)) is not None and over.size:
            self._shared.quota.rescan_mappings(pid, over.size)

    def charge_made(self) -> bool:
        """Charge the pod for all that it maps, once no mapping is in progress; False if one does not finish in time."""
        return self._wait_until_made() and self._charge_unchecked()

    def _charge_unchecked(self) -> bool:
        """Charge mappings that were made while the pod did not use UVM; False if a process does not show its own."""
        self._forget_ended()
        for pid in sorted(self._unchecked):
            if not self._shared.quota.charge_unchecked(self._pod, pid):
                return False
            self._unchecked.discard(pid)
        return True

    def _forget_ended(self) -> None:
        self._unchecked &= set(self._shared.table.pids_of(self._pod))

    def _wait_until_made(self) -> bool:
        until = time.monotonic() + _PATIENCE_S
        self._rescan()
        while self._making.calls and time.monotonic() < until:
            time.sleep(_LOOK_S)
            self._rescan()
        return not self._making.calls

    def _rescan(self) -> bool:
        """Read what the pod's processes map now; True if it is less than before."""
        looked = [self._shared.quota.rescan_mappings(pid) for pid in self._shared.quota.mappings_of(self._pod)]
        looked += [
            self._shared.quota.rescan_mappings(over.pid, over.size) for over in self._making.take_done(_PATIENCE_S)
        ]
        return any(looked)

    def rescan_all(self) -> None:
        """Read what all processes of the pod map: mappings that a dead guardian let through are made by now."""
        for pid in self._shared.quota.mappings_of(self._pod, all_known=True):
            self._shared.quota.rescan_mappings(pid)

    def handle(self, call: Notification, pid: int) -> int:
        """Check a mapping that could become managed memory (docs/decisions/0008).

        CUDA reports EPERM as "not permitted" and goes on. It reports ENOMEM as an unknown error. No errno makes it
        report out of memory.
        """
        if not self._ctx.limited():
            return PROCEED
        if not self._shared.quota.uses_uvm(self._pod):
            self._unchecked.add(pid)
            if len(self._unchecked) > _MANY:
                self._forget_ended()
            self._add(call, pid)
            return PROCEED
        fd, size = mapping(call)
        cost = managed_memory.cost_of(call.arguments[0] if call.arguments[3] & MAP_FIXED else None, size)
        fits = self._shared.quota.reserve_mapping(self._pod, pid, cost)
        if not fits and self._ctx.rescan_mappings():
            fits = self._shared.quota.reserve_mapping(self._pod, pid, cost)
        if not fits:
            self._shared.refusals.count(self._pod, "managed memory over the limit")
            return errno.EPERM if self._is_uvm(pid, fd) else errno.ENOMEM
        self._shared.quota.will_use_uvm(pid)
        self._add(call, pid, cost)
        return PROCEED

    def _add(self, call: Notification, pid: int, cost: int = 0) -> None:
        for over in self._making.add(call, pid, cost):
            self._shared.quota.rescan_mappings(over.pid, over.size)

    def _is_uvm(self, pid: int, fd: int) -> bool:
        device = proc.device(pid, fd)
        return device is not None and os.major(device) == self._shared.uvm_major
