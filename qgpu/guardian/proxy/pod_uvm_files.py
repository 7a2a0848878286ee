"""Pods' UVM files: which the guardian holds, which a dead guardian held, and which are closed."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable

from qgpu.guardian.proxy.held_uvm_files import UvmFile
from qgpu.guardian.proxy.shared_table import SharedPart, SharedTable
from qgpu.linux import proc
from qgpu.nvidia import uvm

#: How long the search for a pod's moved UVM files rests when a process delays it.
_MOVED_AGAIN_S = 1.0


class PodUvmFiles(SharedPart):
    """Holds the UVM files of pods' processes, and records that in the object table."""

    def __init__(self, shared: SharedTable) -> None:
        super().__init__(shared)
        #: By pod, the processes whose UVM files a dead guardian held, and those whose files are not at the recorded
        #: descriptors.
        self._unheld: dict[str, list[int]] = self._kept_by_pod()
        self.moved: dict[str, set[int]] = self._kept_by_pod()

    def held_before(self, pid: int) -> None:
        """Record that a dead guardian held files of a process."""
        self._unheld.setdefault(self._table.processes[pid], []).append(pid)

    def major(self, request: int) -> int | None:
        """Return UVM's major number; the first UVM call looks it up, because UVM may be loaded after us."""
        if self._shared.uvm_major is None and request in uvm.WATCHED:
            self._shared.uvm_major = uvm.major()
        return self._shared.uvm_major

    def hold_all(self, pod: str) -> None:
        """Hold a pod's UVM files again, as the dead guardian did, before it is served; remember those that moved."""
        for pid in self._unheld.pop(pod, ()):
            for fd in list(self._table.uvm_fds.of(pid)):
                if not self._hold_again(pid, fd):
                    self.moved.setdefault(pod, set()).add(pid)

    def _hold_again(self, pid: int, fd: int) -> bool:
        """Hold the UVM file behind a descriptor of a process; False if it is no UVM file."""
        device = proc.device(pid, fd)
        if device is None or os.major(device) != self.major(uvm.REGISTER_GPU):
            return False
        pod = self._table.processes.get(pid)
        if pod is None:
            return False
        try:
            file = self._gpu_ops.taker.take(pod, self._gpu_ops.pidfd(pid), fd)
        except OSError as error:
            if error.errno == errno.EBUSY:  # the pod delays it
                self.moved.setdefault(pod, set()).add(pid)
            return False
        try:
            return self.hold(pid, fd, file)
        finally:
            self._gpu_ops.closer.close(pod, file)

    def hold(self, pid: int, fd: int, file: int) -> bool:
        """Hold a UVM file so that it can be emptied; False if the pod has too many or the process has ended.

        Every card is unregistered from it: a pod can change which cards a mapping names after the check.
        """
        pod = self._table.processes.get(pid, "")
        beside = len(self._table.processes)
        if (known := self._shared.uvm_files.hold(pod, pid, fd, file, self._shared.uuids, beside)) is None:
            return False
        with self._lock:
            if pid in self._table.processes:
                if known not in self._table.uvm_fds.of(pid):
                    self._note({"fact": "uvm_file", "pid": pid, "fd": known, "there": True})
                return True
        self._shared.uvm_files.release(self._shared.uvm_files.take(pid))  # the process ended before its file was held
        return False

    def has_only(self, pid: int, file: int) -> bool:
        """Tell whether a process has cards registered on this UVM file alone, also of what a dead guardian held."""
        return len(self._table.uvm_fds.of(pid)) == 1 and self._shared.uvm_files.has_only(pid, file)

    def find_moved(self, pod: str) -> None:
        """Search a pod's processes for UVM files that moved since a dead guardian recorded them. Takes long."""
        while moved := self.moved.get(pod):
            pid = moved.pop()
            for fd, device in proc.devices(pid):
                if os.major(device) == self.major(uvm.REGISTER_GPU):
                    self._hold_again(pid, fd)
            if pid in moved:
                time.sleep(_MOVED_AGAIN_S)
        self.moved.pop(pod, None)

    def release_closed(self, pod: str) -> bool:
        """Empty the UVM files that a pod has closed; False if there are none. Call it without the lock."""
        closed = self._shared.uvm_files.take_closed(self._table.pids_of(pod))
        for pid, files in closed.items():
            self._shared.uvm_files.release(files)
            with self._lock:
                self.released(pid, files)
        return bool(closed)

    def released(self, pid: int, files: Iterable[UvmFile]) -> None:
        """Record that UVM files of a process are empty; without any other file, nothing of it is mapped."""
        for each in files:
            if not self._shared.uvm_files.has_at(pid, each.theirs):  # it may be registered again by now
                self._note({"fact": "uvm_file", "pid": pid, "fd": each.theirs, "there": False})
        if self._shared.uvm_files.has_none(pid):
            self._shared.quota.unmap(pid, 0, 1 << 64, None)
