"""One pod's mappings that could become managed memory: charged before they are made (docs/decisions/0008)."""

from __future__ import annotations

import errno
import os
import stat

from qgpu.guardian.desk import PRETEND, PROCEED, Desk
from qgpu.guardian.filter import MAP_FIXED, mapping
from qgpu.guardian.loose import Pending
from qgpu.guardian.notify import Notification

#: A process that maps and maps and never asks is told with an errno then.
_MOST_BELIEVED = 1024


class Mappings:
    """Judges mappings, and knows which of them the kernel is making."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._supervisor = desk.supervisor
        self._pod = desk.pod
        self._making = Pending()
        #: Where processes believe to have mapped something.
        self._believed: set[tuple[int, int]] = set()
        desk.look_at_mappings = self._look

    def next_call(self, tid: int, pid: int) -> None:
        """Take note that a thread makes another call: the mapping it was making is made, and shows."""
        if (over := self._making.ended(tid)) is not None:
            self._supervisor.charges.look_at_mappings(pid, over.size)

    def _look(self) -> bool:
        """Find out what the pod's processes map now; True when it is less than before."""
        looked = [
            self._supervisor.charges.look_at_mappings(pid) for pid in self._supervisor.charges.mappings_of(self._pod)
        ]
        looked += [self._supervisor.charges.look_at_mappings(over.pid, over.size) for over in self._making.take_over()]
        return any(looked)

    def judge(self, call: Notification, pid: int) -> int:
        """Judge a mapping that could become managed memory (docs/decisions/0008)."""
        if not self._desk.limited() or not self._supervisor.charges.uses_uvm(pid):
            return PROCEED
        fd, size = mapping(call)
        of_uvm = self._is_uvm(pid, fd)
        fits = self._supervisor.charges.reserve_mapping(self._pod, pid, size)
        if not fits and self._desk.look_at_mappings():
            fits = self._supervisor.charges.reserve_mapping(self._pod, pid, size)
        if not fits:
            self._supervisor.refused(self._pod, "managed memory over the limit")
            return self._refuse(call, pid, of_uvm=of_uvm)
        self._making.let(call, pid, size)
        return PROCEED

    def _refuse(self, call: Notification, pid: int, *, of_uvm: bool) -> int:
        """Say no. CUDA makes no sense of an errno here (an unknown error), but asks UVM what has become of it.

        UVM itself does the same when it cannot map (uvm.c:uvm_mmap): it says nothing until it is asked.
        """
        address, _, _, flags, _, offset = call.arguments
        if not of_uvm or not flags & MAP_FIXED or address != offset or len(self._believed) > _MOST_BELIEVED:
            return errno.ENOMEM
        self._believed.add((pid, address))
        return PRETEND

    def was_refused(self, pid: int, base: int) -> bool:
        """Tell, once, whether a mapping was refused of which UVM is asked now."""
        if (pid, base) not in self._believed:
            return False
        self._believed.discard((pid, base))
        return True

    def _is_uvm(self, pid: int, fd: int) -> bool:
        status = os.stat(f"/proc/{pid}/fd/{fd}")
        return stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == self._supervisor.uvm_major
