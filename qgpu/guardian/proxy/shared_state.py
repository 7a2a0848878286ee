"""Puts the parts of the state that all pods share together, and continues from a dead guardian's journal."""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass, field
from itertools import islice

import structlog

from qgpu.guardian.accounting.memory_quota import MemoryQuota
from qgpu.guardian.gpu.reconciler import Reconciler
from qgpu.guardian.proxy.bound_monitors import BoundMonitors
from qgpu.guardian.proxy.client_registry import ClientRegistry
from qgpu.guardian.proxy.control_files import ControlFiles
from qgpu.guardian.proxy.held_uvm_files import UvmFiles
from qgpu.guardian.proxy.listeners import Listeners
from qgpu.guardian.proxy.object_claims import ObjectClaims
from qgpu.guardian.proxy.pod_uvm_files import PodUvmFiles
from qgpu.guardian.proxy.refusals import Refusals
from qgpu.guardian.proxy.shared_table import SharedTable
from qgpu.linux import proc
from qgpu.nvidia import abi

_log = structlog.get_logger("guardian")

#: How many watches that failed are tried again at once.
_RETRIED_AT_ONCE = 64


@dataclass(slots=True)
class SharedState(SharedTable):
    """The shared table with all its parts."""

    listeners: Listeners = field(init=False)
    monitors: BoundMonitors = field(init=False)
    pod_uvm_files: PodUvmFiles = field(init=False)
    clients: ClientRegistry = field(init=False)
    claims: ObjectClaims = field(init=False)
    control_files: ControlFiles = field(init=False)
    #: Processes that an earlier guardian watched and this one does not so far.
    _unwatched: set[int] = field(default_factory=set)
    _pod_locks: dict[str, threading.RLock] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.listeners, self.refusals = Listeners(self.journal), Refusals(self.lock)
        self.uvm_files = UvmFiles(self.perform)
        self.control_files = ControlFiles(lambda: self.files.makers, self.clock)
        self.monitors = BoundMonitors(
            lambda pod, fd: self.gpu_ops.closer.close(pod, fd), lambda *asked: self.until_own_turn(*asked)
        )
        self.pod_uvm_files = PodUvmFiles(self)
        self.clients = ClientRegistry(self, self.pod_uvm_files)
        self.claims = ObjectClaims(self, self.clients)
        allowance, look = (lambda pod: self.allowance(pod)), self.clients.recheck
        uuids, uvm_files = (lambda: self.uuids), self.uvm_files.count
        self.quota = MemoryQuota(
            self.table, self.lock, self.note, allowance, look, uuids, uvm_files, self.files.carriers
        )
        forget, wake = self.clients.forget_at_once, (lambda: self.wake())
        self.reconciler = Reconciler(self.table, self.gpu_ops, self.note, forget, self.clock, wake)

    def listener_closed(self, number: int) -> None:
        """Forget a listener without processes; a pod without listeners has no processes."""
        pod = self.listeners.remove(number)
        if pod not in (other for other, _ in self.listeners.values()):
            self.note({"fact": "ended", "name": pod})

    def pod_lock(self, pod: str) -> threading.RLock:
        """Return a pod's lock, held while RM's figures of its memory are read and while others duplicate its memory."""
        with self.lock:
            return self._pod_locks.setdefault(pod, threading.RLock())

    def retired(self, pod: str) -> None:
        """Forget what was counted of a pod that was retired."""
        self.refusals.forget(pod)
        self.monitors.retired(pod)
        for kept in (self._pod_locks, *self.by_pod):
            kept.pop(pod, None)

    def resume(self) -> None:
        """Continue with a table rebuilt from a journal: watch its processes."""
        self.table.allocations.discharge_unused()
        self._unwatched = set(self.table.processes)
        for pid in list(self._unwatched):
            if (error := self._watch_again(pid)) is not None:
                _log.error("a pod's process cannot be watched so far", pid=pid, reason=str(error))
        for rm in self.table.objects.values():
            if not rm.confirmed:
                self.claims.unconfirmed(rm)
            if rm.rm_class in abi.GPFIFO_CLASSES and not rm.context:
                self.reconciler.object_made(rm)

    def retry_watches(self) -> None:
        """Watch processes whose watch failed when this guardian took over: who is not watched never ends."""
        for pid in list(islice(self._unwatched, _RETRIED_AT_ONCE)):
            if self._watch_again(pid) is None:
                _log.info("a pod's process is watched now", pid=pid)

    def _watch_again(self, pid: int) -> OSError | None:
        """Watch a process of an earlier guardian, or find that it has ended; return why that failed."""
        try:
            if pid in self.table.processes:
                pidfd = self._pidfd_of(pid)
                if proc.start_time(pid) != self.table.started[pid] != "":
                    raise ProcessLookupError(errno.ESRCH, "another process has its pid")
                self.watch(pid, pidfd)
                if pid in self.table.uvm_fds:
                    self.pod_uvm_files.held_before(pid)
        except (ProcessLookupError, FileNotFoundError):
            self.gpu_ops.unwatch(pid)
            self.note({"fact": "exit", "pid": pid})
        except OSError as error:
            return error
        self._unwatched.discard(pid)
        return None

    def _pidfd_of(self, pid: int) -> int:
        try:
            return self.gpu_ops.pidfd(pid)
        except ProcessLookupError:
            return self.gpu_ops.watch(pid)

    def monitors_bound(self, pod: str, pid: int, client: int, profiler: int, file: int) -> None:
        """Remember that a process has bound the card's monitors by a profiler of a client."""
        with self.lock:
            self.monitors.bound(pod, pid, client, profiler, file)
            if pid not in self.table.processes:  # killed meanwhile
                self.monitors.exited(pid)

    def exited(self, pid: int) -> bool:
        """Forget a process that has ended; its clients stay until RM drops them: their files may be open elsewhere.

        Return True if scheduling may change. Processes without channels come and go by the hundred and change nothing.
        """
        with self.lock:
            self.quota.exited(pid)
            used = list(self.table.used.of(pid))
            self.reconciler.recheck_clients(used)
            self.note({"fact": "exit", "pid": pid})
            self.monitors.exited(pid)
            self.gpu_ops.unwatch(pid)
            return any(client in self.table.channel_handles for client in used)
