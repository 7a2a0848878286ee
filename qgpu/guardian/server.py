"""The guardian's main loop (daemon requests, process exits, window edges), and a thread for each listener of a pod.

A pod can make its memory as slow as it likes, so threads of its own serve its calls (``dispatcher.py``); they take the
one lock only for look-ups. Only the main loop moves gates and sets timeslices.
"""

from __future__ import annotations

import os
import select
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog

from qgpu.errors import NoGpuError, NotSupportedError, RmError
from qgpu.guardian.accounting.memory_quota import NO_POD, Allowance
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.rm_object import Key
from qgpu.guardian.daemon_requests import DaemonRequests
from qgpu.guardian.daemon_sessions import DaemonSessions
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.gpu.gpu import Gpu
from qgpu.guardian.gpu.gpu_ops import GpuOps
from qgpu.guardian.proxy.control_file_search import ControlFileSearch
from qgpu.guardian.proxy.dispatcher import Dispatcher
from qgpu.guardian.proxy.held_uvm_files import UvmFile
from qgpu.guardian.proxy.shared_state import SharedState
from qgpu.linux import capabilities, cgroup
from qgpu.linux.open_file_set import FileSets
from qgpu.linux.pod_threads import PodThreads
from qgpu.linux.timerfd import Timer
from qgpu.model import NS_PER_MS, NS_PER_S, Grant
from qgpu.model.plane_api import MigInstance
from qgpu.nvidia import mig, uvm
from qgpu.nvidia.ctxsw_log import ContextSwitches, CtxswLog, DividedLog, InstanceLog
from qgpu.nvidia.rm_client import RmClient
from qgpu.nvidia.rm_device import RmDevice, gpu_instance_uuid, open_devices
from qgpu.nvidia.versions import find, installed

_log = structlog.get_logger("guardian")

#: How long a thread may run Python before the interpreter switches to another.
_SWITCH_S = 0.0005
#: How long a pod's thread waits for the main loop to open a gate before it continues.
_GATE_PATIENCE_S = 1.0
#: How long the main loop pauses after an unexpected error.
_REST_S = 0.01
#: How many ended processes the main loop learns of at once.
_ENDED_AT_ONCE = 256
#: How long the main loop forgets ended processes before it does anything else.
_FORGETTING_NS = 10 * NS_PER_MS
#: Listing open exports takes at most 1/_PARTS of the time: the kernel lists all control files of pods with them, and
#: nobody can make a client meanwhile.
_PARTS = 20
#: With no daemon and no pod left for this long, the guardian ends.
_LINGER_NS = 5 * NS_PER_S


class Guardian:
    """Everything the guardian process holds."""

    def __init__(
        self,
        runtime_dir: Path,
        journal: Journal,
        files: FileSets,
        table: ObjectTable,
        listeners: Mapping[int, tuple[str, int]],
    ) -> None:
        version = installed()
        client, branch, self.table = RmClient(), find(version), table
        devices = open_devices(client)
        self.gpu_ops = GpuOps(table, branch, client, devices)
        for device in devices:
            self.gpu_ops.open_gates(device)  # first of all: a pod may be waiting behind a gate
        table.grces = {device.instance: device.grces() for device in devices}
        self._search_for_control_files()
        self.cards: dict[int, Gpu] = {}
        self.shared = SharedState(
            table,
            journal,
            self.gpu_ops,
            self._open_for_free,
            self._cancel_free,
            self._watch,
            time.monotonic_ns,
            self._allowance,
            self._until_own_turn,
            self._wake,
            uvm_major=uvm.major(),
            uvm_layouts=uvm.layouts(version),
            multicast_keeps=branch.multicast_keeps,
            uuids={device.uuid(): mig.card_of(device.instance) for device in devices},
            files=files,
        )
        self._add_cards(devices, mig.shared(runtime_dir))
        self.lock = self.shared.lock
        #: By pod, what its grants allow, with the grants from which that follows.
        self._allowances: dict[str, tuple[Mapping[int, Grant], Allowance]] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._dispatchers: dict[str, Dispatcher] = {}
        self._looked_ns = self._list_exports_ns = 0
        #: Threads that look for pods' closed files, and empty UVM files: that takes as long as freeing their memory.
        #: They also look for what ended processes left mapped; these pods wait for that.
        self._file_work = PodThreads("qgpu-files")
        self._to_search: set[str] = set()
        #: The processes by pidfd, in an epoll: it takes no longer to wait for thousands of them.
        self._exits, self._watched = select.epoll(), dict[int, int]()
        #: Processes that have ended, to be forgotten: a pod can end thousands at once.
        self._ended: deque[int] = deque()
        #: Work that other threads hand to the main loop; writing to the eventfd wakes it.
        self._queued: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.PollSelector()
        self._timer = Timer()
        self._selector.register(self._timer.fd, selectors.EVENT_READ, self._timer.clear)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._run_queued)
        self._selector.register(self._exits, selectors.EVENT_READ, self._processes_ended)
        self._alone_since_ns: int | None = time.monotonic_ns()
        sys.setswitchinterval(_SWITCH_S)
        self._resume(listeners)
        serve, amended, retired = self._serve_listener, self._amended, self._retired
        requests = DaemonRequests(version, self.shared, self.cards, serve, amended, retired)
        # Last, because a daemon that can connect expects an answer.
        path = runtime_dir / "guardian.sock"
        self._sessions = DaemonSessions(
            path, self._selector, table, requests.find, lambda index: self.cards[index].release(time.monotonic_ns())
        )

    def _search_for_control_files(self) -> None:
        """Search for the file of each client that no known descriptor leads to any more."""
        search = ControlFileSearch(
            self.table,
            self.gpu_ops.clients_behind_fd,
            self.gpu_ops.has_client,
            lambda client, pid, fd: self.shared.clients.record_file_found(client, pid, fd),
            lambda: self._in_main_loop(self._changed),
        )
        self.gpu_ops.on_unreachable, self.gpu_ops.lost = search.search_for, search.lost
        self.gpu_ops.on_replaced = lambda rm: self.shared.claims.replaced(rm)

    def _add_cards(self, devices: Iterable[RmDevice], divided: Collection[int]) -> None:
        """Set up measurable cards, and the MIG instances of those that are ``divided``. Raises NoGpuError if none."""
        logs: dict[int, DividedLog] = {}
        for device in devices:
            if device.mig is not None and device.mig.card not in divided:
                continue  # left alone, as the daemon says
            log: ContextSwitches
            try:
                log = CtxswLog(device) if device.mig is None else self._log_of(device, device.mig, logs)
            except (RmError, OSError) as error:  # without these records GPU time cannot be measured
                _log.error("card excluded: no context-switch records", pci=device.pci, reason=str(error))
                continue
            index = device.index
            self.cards[index] = Gpu(index, device, self.table, self.gpu_ops, log, self.shared.reconciler.recheck)
        if not self.cards:
            raise NoGpuError("no NVIDIA card here that qgpu can share; its log says why")

    def _log_of(self, device: RmDevice, instance: MigInstance, logs: dict[int, DividedLog]) -> InstanceLog:
        """Open a MIG instance's part of its card's log, and learn its UUID of UVM's. Raises RmError, OSError."""
        if instance.card not in logs:
            device.see_all_instances()
            logs[instance.card] = DividedLog(CtxswLog(device))
        self.shared.uuids = {**self.shared.uuids, gpu_instance_uuid(device): device.instance}
        return logs[instance.card].of(instance)

    def _resume(self, listeners: Mapping[int, tuple[str, int]]) -> None:
        """Continue where the last guardian ended: with its object table, its cards' timeslices and its listeners."""
        with self.lock:  # a search thread may have started, and writes to the table
            self.shared.resume()
            for card in self.cards.values():
                card.enforcer.forget_timeslices()
                card.release(time.monotonic_ns())
        for number, (pod, fd) in listeners.items():
            self.shared.listeners.add(pod, fd, number)
            self._in_main_loop(partial(self._serve_listener, number))

    def run(self) -> None:
        """Serve until no daemon, process or listener is left."""
        while not self._is_unused():
            try:
                self._serve()
            except Exception:  # noqa: BLE001 - pods depend on this process: log, open the gates, go on
                _log.exception("guardian: unexpected error; gates open, driver timeslices restored")
                for card in self.cards.values():
                    with suppress(Exception):  # the daemon's next plan starts again
                        card.release(time.monotonic_ns())
                time.sleep(_REST_S)  # if the error repeats, do not use a whole CPU

    def _serve(self) -> None:
        """Wait for the next event, handle it, and do what is due by now."""
        with self.lock:
            self._timer.set(self._until_due())
        ready = self._selector.select()
        with self.lock:
            for key, _ in ready:
                key.data()
            self._run_due()

    def _wake(self) -> None:
        """Make the main loop look again at what is due; callable from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def _in_main_loop(self, do: Callable[[], None]) -> None:
        """Queue work for the main loop; callable from any thread."""
        self._queued.append(do)
        self._wake()

    def _run_queued(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while self._queued:
            self._queued.popleft()()

    # -- time -------------------------------------------------------------------------------------------------

    def _until_due(self) -> int:
        """Return the time in ns until the main loop must run, whatever else happens."""
        now = time.monotonic_ns()
        due = [now if self._ended else now + NS_PER_S]
        if (confirm := self.shared.reconciler.due_ns()) is not None:
            due.append(confirm)
        for card in self.cards.values():
            if (wait := card.enforcer.step(now)) is not None:
                due.append(now + wait)
            if card.lease_until_ns is not None:
                due.append(card.lease_until_ns)
            if self.table.processes:
                due.append(card.drain_due_ns)
        return min(due) - time.monotonic_ns()

    def _run_due(self) -> None:
        now = time.monotonic_ns()
        if self._forget_ended() | self.shared.reconciler.run_due(now):
            self._changed()
        if now - self._looked_ns >= NS_PER_S:
            self._looked_ns = now
            self._look_at_files()
            self.shared.retry_watches()
            if self._is_used():  # a guardian without daemon and pods ends soon and needs no socket
                self._sessions.restore_socket()
        for card in self.cards.values():
            if card.lease_until_ns is not None and card.lease_until_ns <= now:
                _log.warning("lease expired: gates open, driver timeslices restored", pgpu=card.index)
                card.release(now)
            if self.table.processes and card.drain_due_ns <= now:
                card.drain(now)

    def _is_used(self) -> bool:
        return bool(self._sessions or self.table.processes or self.shared.listeners)

    def _is_unused(self) -> bool:
        now = time.monotonic_ns()
        if self._is_used():
            self._alone_since_ns = None
        elif self._alone_since_ns is None:
            self._alone_since_ns = now
        return self._alone_since_ns is not None and now - self._alone_since_ns > _LINGER_NS

    def _changed(self) -> None:
        """Bring gates and timeslices in line with the object table, and notify the daemon."""
        now = time.monotonic_ns()
        for card in self.cards.values():
            card.enforcer.refresh(now)
        self._sessions.broadcast({"event": "changed"})

    # -- pods -------------------------------------------------------------------------------------------------

    def _allowance(self, pod: str) -> Allowance:
        """Return what a pod's grants allow. Pods' threads ask without the lock, while the main loop changes grants."""
        if (entry := self.table.pods.get(pod)) is None:
            return NO_POD
        grants = entry.grants
        known, found = self._allowances.get(pod, (None, NO_POD))
        if known is not grants:
            granted = [(self.cards[index].device, grant) for index, grant in grants.items() if index in self.cards]
            found = Allowance(
                {device.instance: device.minor for device, _ in granted},
                {device.instance: grant.memory for device, grant in granted if grant.memory is not None},
                profiling=bool(grants) and all(grant.profiling for grant in grants.values()),
                graphics=bool(grants) and all(grant.graphics for grant in grants.values()),
            )
            self._allowances[pod] = grants, found
        return found

    def _open_for_free(self, channels: list[Key]) -> None:
        """Have the main loop open the gate over channels about to be freed, under the lock; return once it is open."""
        opened, late = threading.Event(), threading.Event()
        freed = {key: self.table.objects.get(key) for key in channels}

        def open_for_free() -> None:
            if late.is_set():
                return  # the free may be over, and RM may have refused it
            still = [key for key, rm in freed.items() if self.table.objects.get(key) is rm]
            for card in self.cards.values():
                card.enforcer.open_for_free(still)
            opened.set()

        self._in_main_loop(open_for_free)
        if not opened.wait(_GATE_PATIENCE_S):
            with self.shared.lock:
                late.set()

    def _until_own_turn(self, pod: str, client: int, held_ns: int) -> int:
        with self.shared.lock:
            instances = self.table.instances_of(client)
        now = time.monotonic_ns()
        cards = [card for card in self.cards.values() if card.device.instance in instances]
        return max((card.enforcer.until_lock_fits(pod, held_ns, now) for card in cards), default=0)

    def _cancel_free(self, channels: list[Key]) -> None:
        for card in self.cards.values():
            card.enforcer.cancel_free(channels)

    def _watch(self, pid: int, pidfd: int) -> None:
        self._exits.register(pidfd, select.EPOLLIN)
        self._watched[pidfd] = pid

    def _processes_ended(self) -> None:
        for pidfd, _ in self._exits.poll(0, _ENDED_AT_ONCE):
            self._exits.unregister(pidfd)
            self._ended.append(self._watched.pop(pidfd))

    def _forget_ended(self) -> bool:
        """Forget processes that have ended, for a bounded time; return True if scheduling may change."""
        changed, until_ns = False, time.monotonic_ns() + _FORGETTING_NS
        while self._ended and time.monotonic_ns() < until_ns:
            pid = self._ended.popleft()
            pod = self.table.processes.get(pid, "")
            if files := self.shared.uvm_files.take(pid):
                self._file_work.do(pod, partial(self._release, pid, files))
            else:
                changed |= self.shared.exited(pid)
                self._search_mappings(pod)
        return changed

    def _search_mappings(self, pod: str) -> None:
        """Let the pod's thread find out what is left of ended processes' mappings; once for all that end until then."""
        if pod not in self._to_search and self.shared.quota.search.may_begin(pod):
            self._to_search.add(pod)
            self._file_work.do(pod, partial(self._search, pod))

    def _search(self, pod: str) -> None:
        self._to_search.discard(pod)
        self.shared.quota.search.clear(pod)

    def _release(self, pid: int, files: list[UvmFile]) -> None:
        """Empty the UVM files of an ended process, which is then forgotten; a pod's thread runs this."""
        self.shared.uvm_files.release(files)
        self._in_main_loop(partial(self._ended.append, pid))

    def _look_at_files(self) -> None:
        """Find closed files that keep memory; a pod can have very many files."""
        self._file_work.retry()
        for pod in self.shared.uvm_files.pods():
            self._look(pod, partial(self.shared.pod_uvm_files.release_closed, pod))
        for pod in list(self.table.allocations.managed_left):
            self._search_mappings(pod)
        if self.table.allocations.carries("")[1] and self._looked_ns >= self._list_exports_ns:
            self._look("", self._look_at_carriers)

    def _look(self, pod: str, look: Callable[[], object]) -> None:
        """Look for closed files, unless the pod's thread still works."""
        if not self._file_work.waiting(pod):
            self._file_work.do(pod, look)

    def _look_at_carriers(self) -> None:
        """Discharge exported memory whose exporting file is closed everywhere."""
        began_ns = time.monotonic_ns()
        closed = self.shared.quota.closed_carriers()
        self._list_exports_ns = time.monotonic_ns() + _PARTS * (time.monotonic_ns() - began_ns)
        self.shared.quota.carriers_closed(closed)

    def _see_notes(self, pod: str) -> None:
        """See that the pod's cgroups have notes, which threads without capabilities cannot."""
        entry = self.table.pods.get(pod)
        for path in entry.cgroups if entry is not None else ():
            with suppress(OSError, NotSupportedError):  # its processes are then listed from all of the host's
                cgroup.keeps_times(path)

    def _serve_pod(self, number: int) -> None:
        """Serve a listener until no process is behind it; a pod's thread runs this.

        It uses poll, and neither epoll nor a blocking receive, because only poll lets a stopped thread wake us on its
        own CPU (SYNC_WAKE_UP). That hand-over is most of what a call costs the pod.
        """
        pod, listener = self.shared.listeners[number]
        self._see_notes(pod)
        capabilities.keep_only(
            capabilities.CAP_SYS_PTRACE, capabilities.CAP_DAC_READ_SEARCH, at_hand=capabilities.CAP_PERFMON
        )
        dispatcher = self._dispatchers[pod]
        try:
            dispatcher.resume(listener, self.shared.listeners.unanswered_call(number))
        except OSError as error:  # its further calls are served all the same
            _log.warning("what a dead guardian left is not all found", pod=pod, error=str(error))
        if pod in self.shared.pod_uvm_files.moved:
            self._file_work.do(pod, partial(self.shared.pod_uvm_files.find_moved, pod))
        self._in_main_loop(lambda: self.shared.clients.recheck_pods([pod]))
        poll = select.poll()
        poll.register(listener.fd, select.POLLIN)
        while True:
            waiting = poll.poll()[0][1]
            if waiting & select.POLLIN:
                if (call := listener.receive()) is not None:
                    dispatcher.serve(listener, call)
            elif waiting & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                break
        self._in_main_loop(lambda: self._listener_closed(number, listener.fd))

    def _listener_closed(self, number: int, fd: int) -> None:
        """Forget a listener once all processes behind it have ended."""
        self._threads.pop(number).join()
        self.shared.listener_closed(number)
        os.close(fd)
        self._sessions.broadcast({"event": "listener-gone", "listener": number})

    def _serve_listener(self, number: int) -> None:
        if number in self._threads:
            return
        pod, _ = self.shared.listeners[number]
        self._dispatchers.setdefault(pod, Dispatcher(self.shared, pod))
        name = f"qgpu-pod-{number}"
        thread = threading.Thread(target=self._serve_pod, args=(number,), name=name, daemon=True)
        thread.start()  # RuntimeError without a free thread: then the listener counts as not served
        self._threads[number] = thread

    def _amended(self, pod: str) -> None:
        self._allowances.pop(pod, None)  # of a pod that was retired, too
        self._changed()

    def _retired(self, pod: str) -> None:
        self._dispatchers.pop(pod, None)
        self._file_work.forget(pod)
        self._to_search.discard(pod)
        self.shared.quota.search.forget(pod)
        self.gpu_ops.closer.forget(pod)
        self.gpu_ops.taker.forget(pod)
        self._amended(pod)
        for card in self.cards.values():
            card.enforcer.forget(pod)
            card.gpfifo_progress.forget(pod)
