"""One pod's mappings that could become managed memory: charged before they are made (docs/decisions/0008)."""

from __future__ import annotations

import errno
import os
import time

from qgpu.guardian.accounting import managed_memory
from qgpu.guardian.proxy.handler_context import PROCEED, HandlerContext
from qgpu.guardian.proxy.seccomp_filter import MAP_FIXED, mapping
from qgpu.linux import proc
from qgpu.linux.inflight_syscalls import InflightSyscalls
from qgpu.linux.seccomp_notify import Notification

#: How long a mapping being made may keep a process from joining UVM.
_PATIENCE_S, _LOOK_S = 0.02, 0.001


class MmapHandler:
    """Judges mappings, and knows which of them the kernel is making."""

    def __init__(self, ctx: HandlerContext) -> None:
        self._ctx = ctx
        self._supervisor = ctx.supervisor
        self._pod = ctx.pod
        self._making = InflightSyscalls()
        ctx.look_at_mappings = self._look

    def next_call(self, tid: int, pid: int) -> None:
        """Take note that a thread makes another call: the mapping it was making is made, and shows."""
        if (over := self._making.ended(tid)) is not None and over.size:
            self._supervisor.quota.look_at_mappings(pid, over.size)

    def are_made(self) -> bool:
        """Wait until no mapping is being made, by whomever; False when one does not end."""
        until = time.monotonic() + _PATIENCE_S
        self._look()
        while self._making.calls and time.monotonic() < until:
            time.sleep(_LOOK_S)
            self._look()
        return not self._making.calls

    def _look(self) -> bool:
        """Find out what the pod's processes map now; True when it is less than before."""
        looked = [self._supervisor.quota.look_at_mappings(pid) for pid in self._supervisor.quota.mappings_of(self._pod)]
        looked += [self._supervisor.quota.look_at_mappings(over.pid, over.size) for over in self._making.take_over()]
        return any(looked)

    def look_anew(self) -> None:
        """Find out what the pod's processes map: what a dead guardian let them make, they have made since."""
        for pid in self._supervisor.quota.mappings_of(self._pod, all_known=True):
            self._supervisor.quota.look_at_mappings(pid)

    def handle(self, call: Notification, pid: int) -> int:
        """Judge a mapping that could become managed memory (docs/decisions/0008).

        CUDA makes "not permitted" of EPERM, and goes on; of ENOMEM it makes an unknown error, and of no errno at all
        that it is out of memory.
        """
        if not self._ctx.limited():
            return PROCEED
        if not self._supervisor.quota.uses_uvm(pid):
            self._making.let(call, pid)
            return PROCEED
        fd, size = mapping(call)
        cost = managed_memory.cost_of(call.arguments[0] if call.arguments[3] & MAP_FIXED else None, size)
        fits = self._supervisor.quota.reserve_mapping(self._pod, pid, cost)
        if not fits and self._ctx.look_at_mappings():
            fits = self._supervisor.quota.reserve_mapping(self._pod, pid, cost)
        if not fits:
            self._supervisor.refused(self._pod, "managed memory over the limit")
            return errno.EPERM if self._is_uvm(pid, fd) else errno.ENOMEM
        self._making.let(call, pid, cost)
        return PROCEED

    def _is_uvm(self, pid: int, fd: int) -> bool:
        device = proc.device(pid, fd)
        return device is not None and os.major(device) == self._supervisor.uvm_major
