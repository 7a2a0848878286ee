"""The guardian's main loop: the daemon's messages, deaths, and the edges of windows; and a thread for each pod's calls.

A pod's memory may be as slow as the pod likes, so its calls are served by a thread of their own (``judge.py``), which
holds the one lock only to look things up. Everything that moves gates or timeslices is done by the main loop.
"""

from __future__ import annotations

import os
import select
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog

from qgpu.errors import NoGpuError, RmError
from qgpu.guardian.accounting.memory_quota import NO_POD, Allowance
from qgpu.guardian.accounting.object_table import Key, ObjectTable
from qgpu.guardian.daemon_requests import DaemonRequests
from qgpu.guardian.daemon_sessions import DaemonSessions
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.gpu.gpu import Gpu
from qgpu.guardian.gpu.gpu_ops import GpuOps
from qgpu.guardian.proxy.dispatcher import Dispatcher
from qgpu.guardian.proxy.moved_files import MovedFileSearch
from qgpu.guardian.proxy.supervisor import Supervisor
from qgpu.guardian.proxy.uvm_files import UvmFile
from qgpu.linux import capabilities
from qgpu.linux.open_file_set import FileSets
from qgpu.linux.timerfd import Timer
from qgpu.model import NS_PER_S
from qgpu.nvidia import uvm
from qgpu.nvidia.ctxsw_log import CtxswLog
from qgpu.nvidia.rm_client import RmClient
from qgpu.nvidia.rm_device import open_devices
from qgpu.nvidia.versions import find, installed

_log = structlog.get_logger("guardian")

#: How long one thread may keep the others from running Python when it does not wait for anything itself.
_SWITCH_S = 0.0005
#: How long a pod's thread waits for the main loop to move a gate before it goes on without.
_GATE_PATIENCE_S = 1.0
#: How long the main loop rests after a defect.
_REST_S = 0.01
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
        self.version = installed()
        branch = find(self.version)
        client = RmClient()
        self.table = table
        self.journal = journal
        devices = open_devices(client)
        self.gpu_ops = GpuOps(self.table, branch, client, devices)
        for device in devices:
            self.gpu_ops.open_gates(device)  # before all that takes longer: a pod may be waiting behind one
        self._search = MovedFileSearch(
            self.table,
            self.gpu_ops.reaches,
            lambda client: self.gpu_ops.exists((client, client)),
            lambda client, pid, fd: self.supervisor.reached(client, pid, fd),
            lambda: self._soon(self._changed),
        )
        self.gpu_ops.unreached, self.gpu_ops.lost = self._search.want, self._search.lost
        self.cards: dict[int, Gpu] = {}
        self.supervisor = Supervisor(
            self.table,
            journal,
            self.gpu_ops,
            self._leave,
            self._stayed,
            self._watch,
            time.monotonic_ns,
            self._allowance,
            self._wake,
            uvm_major=uvm.major(),
            uvm_layouts=uvm.layouts(self.version),
            uuids={device.uuid(): device.instance for device in devices},
            files=files,
        )
        for index, device in enumerate(devices):
            try:
                log = CtxswLog(device)
            except RmError as error:  # a card without such records: what it does could not be measured
                _log.error("card left out: no context-switch records", pci=device.pci, reason=str(error))
                continue
            self.cards[index] = Gpu(index, device, self.table, self.gpu_ops, log, self.supervisor.reconciler.doubt)
        if not self.cards:
            raise NoGpuError("no NVIDIA card here that qgpu can share; its log says why")
        self.lock = self.supervisor.lock
        self._allowances: dict[str, Allowance] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._judges: dict[str, Dispatcher] = {}
        self._looked_ns = 0
        #: By pod, who looks what its processes have closed.
        self._looking: dict[str, threading.Thread] = {}
        #: What found no thread.
        self._unreleased: list[Callable[[], None]] = []
        #: What pods' threads leave to the main loop, and what rouses it.
        self._left: deque[Callable[[], None]] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.PollSelector()
        self._timer = Timer()
        self._selector.register(self._timer.fd, selectors.EVENT_READ, self._timer.clear)
        self._selector.register(self._bell, selectors.EVENT_READ, self._answer_bell)
        self._alone_since_ns: int | None = time.monotonic_ns()
        sys.setswitchinterval(_SWITCH_S)
        with self.lock:  # a search may have begun, which takes notes too
            self.supervisor.resume()
            for card in self.cards.values():
                card.enforcer.distrust()
                card.release(time.monotonic_ns())
        for number, (pod, fd) in listeners.items():
            self.supervisor.listen(pod, fd, number)
        self._soon(self._serve_listeners)
        self._soon(self._find_moved)
        requests = DaemonRequests(
            self.version, self.supervisor, self.cards, self._serve_listener, self._amended, self._retired
        )
        # Last, for who can connect expects an answer.
        path = runtime_dir / "guardian.sock"
        self._sessions = DaemonSessions(path, self._selector, self.table, requests.find, self._daemon_gone)

    def run(self) -> None:
        """Serve until there is nobody left to serve."""
        while not self._nobody_left():
            try:
                self._serve()
            except Exception:  # noqa: BLE001 - pods depend on this process: report, let go of them, go on
                _log.exception("guardian: unexpected; gates open, timeslices the driver's")
                for card in self.cards.values():
                    card.let_go(time.monotonic_ns())
                time.sleep(_REST_S)  # and should it go on, not at the price of a whole CPU

    def _serve(self) -> None:
        """Wait for the next thing, do it, and what else has come due."""
        with self.lock:
            self._timer.set(self._until_due())
        ready = self._selector.select()
        with self.lock:
            for key, _ in ready:
                key.data()
            self._turn()

    def _wake(self) -> None:
        """Make the main loop look again at what is due; from any thread."""
        os.eventfd_write(self._bell, 1)

    def _soon(self, do: Callable[[], None]) -> None:
        """Have something done by the main loop; from any thread."""
        self._left.append(do)
        self._wake()

    def _answer_bell(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while self._left:
            self._left.popleft()()

    # -- time -------------------------------------------------------------------------------------------------

    def _until_due(self) -> int:
        """Return the ns to the next thing that is due whatever arrives."""
        now = time.monotonic_ns()
        due = [now + NS_PER_S]
        if (confirm := self.supervisor.reconciler.due_ns()) is not None:
            due.append(confirm)
        for card in self.cards.values():
            if (wait := card.enforcer.step(now)) is not None:
                due.append(now + wait)
            if card.lease_until_ns is not None:
                due.append(card.lease_until_ns)
            if self.table.processes:
                due.append(card.drain_due_ns())
        return min(due) - time.monotonic_ns()

    def _turn(self) -> None:
        """Do what time or the last messages made due."""
        now = time.monotonic_ns()
        if self.supervisor.reconciler.settle(now):
            self._changed()
        if now - self._looked_ns >= NS_PER_S:
            self._looked_ns = now
            self._look_at_files()
            if self._has_somebody():  # nobody looks for one that is about to end
                self._sessions.stay()
        for card in self.cards.values():
            if card.lease_until_ns is not None and card.lease_until_ns <= now:
                _log.warning("lease lapsed: gates open, timeslices the driver's", pgpu=card.index)
                card.release(now)
            if self.table.processes and card.drain_due_ns() <= now:
                card.drain(now)

    def _has_somebody(self) -> bool:
        return bool(self._sessions or self.table.processes or self.supervisor.listeners)

    def _nobody_left(self) -> bool:
        now = time.monotonic_ns()
        if self._has_somebody():
            self._alone_since_ns = None
        elif self._alone_since_ns is None:
            self._alone_since_ns = now
        return self._alone_since_ns is not None and now - self._alone_since_ns > _LINGER_NS

    def _changed(self) -> None:
        """Bring gates and timeslices in line with the register and wake the daemon."""
        now = time.monotonic_ns()
        for card in self.cards.values():
            card.enforcer.refresh(now)
        self._sessions.tell({"event": "changed"})

    def _daemon_gone(self, index: int) -> None:
        _log.info("daemon gone: gates open, timeslices the driver's", pgpu=index)
        self.cards[index].release(time.monotonic_ns())

    # -- pods -------------------------------------------------------------------------------------------------

    def _find_moved(self) -> None:
        with suppress(RuntimeError):
            _start(self.supervisor.find_moved, "qgpu-moved")

    def _allowance(self, pod: str) -> Allowance:
        if pod not in self.table.pods:
            return NO_POD
        found = self._allowances.get(pod)
        if found is None:
            grants = self.table.pods[pod].grants
            granted = [(self.cards[index].device, grant) for index, grant in grants.items() if index in self.cards]
            found = self._allowances[pod] = Allowance(
                {device.instance: device.minor for device, _ in granted},
                {device.instance: grant.memory for device, grant in granted if grant.memory is not None},
            )
        return found

    def _leave(self, channels: list[Key]) -> None:
        """Open the gate over channels about to be freed, and return when it is open."""
        opened = threading.Event()

        def leave() -> None:
            for card in self.cards.values():
                card.enforcer.leave(channels)
            opened.set()

        self._soon(leave)
        opened.wait(_GATE_PATIENCE_S)

    def _stayed(self, channels: list[Key]) -> None:
        for card in self.cards.values():
            card.enforcer.stayed(channels)

    def _watch(self, pid: int, pidfd: int) -> None:
        def exited() -> None:
            self._selector.unregister(pidfd)
            if files := self.supervisor.uvm_files.take(pid):
                self._release(files, gone)
            else:
                gone()

        def gone() -> None:
            if self.supervisor.exited(pid):
                self._changed()

        self._soon(lambda: self._selector.register(pidfd, selectors.EVENT_READ, exited) and None)

    def _release(self, files: list[UvmFile], then: Callable[[], None]) -> None:
        """Empty files of UVM's by a thread, for it takes as long as freeing memory does."""

        def release() -> None:
            self.supervisor.uvm_files.release(files)
            self._soon(then)

        try:
            _start(release, "qgpu-release")
        except RuntimeError:  # no thread is to be had: again within a second
            self._unreleased.append(lambda: self._release(files, then))

    def _look_at_files(self) -> None:
        """See which files have been closed that keep memory; each pod's by a thread, for a pod can have very many."""
        again, self._unreleased = self._unreleased, []
        for release in again:
            release()
        with_files = {self.table.processes.get(pid, "") for pid in self.supervisor.uvm_files.processes()}
        for pod in with_files - {""}:
            self._look(pod, partial(self._release_closed, pod))
        if self.table.allocations.carriers():
            self._look("", self._look_at_carriers)

    def _look(self, pod: str, look: Callable[[], None]) -> None:
        """Have a thread look, unless the last one still does."""
        if pod not in self._looking or not self._looking[pod].is_alive():
            with suppress(RuntimeError):
                self._looking[pod] = _start(look, "qgpu-look")

    def _release_closed(self, pod: str) -> None:
        """Empty the files of UVM's that a pod's processes have closed: held here, their memory would stay."""
        for pid, files in self.supervisor.uvm_files.take_closed(self.table.pids_of(pod)).items():
            self._release(files, partial(self.supervisor.emptied, pid, files))

    def _look_at_carriers(self) -> None:
        """Discharge what was kept by files that nobody has open any more."""
        self.supervisor.quota.carriers_closed(self.supervisor.quota.closed_carriers())

    def _serve_pod(self, number: int) -> None:
        """Serve a listener until nobody is left behind it: the body of a pod's thread.

        poll and not epoll, nor a receive that waits: only through poll does a stopped thread wake us on its own CPU
        (SYNC_WAKE_UP), and that hand-over is most of what a call costs the pod.
        """
        capabilities.keep_only(capabilities.CAP_SYS_PTRACE, capabilities.CAP_DAC_READ_SEARCH)
        pod, listener = self.supervisor.listeners[number]
        dispatcher = self._judges[pod]
        dispatcher.take_up(listener, self.supervisor.left_in_hand(number))
        self._soon(lambda: self.supervisor.look_over([pod]))
        poll = select.poll()
        poll.register(listener.fd, select.POLLIN)
        while True:
            waiting = poll.poll()[0][1]
            if waiting & select.POLLIN:
                if (call := listener.receive()) is not None:
                    dispatcher.serve(listener, call)
            elif waiting & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                break
        self._soon(lambda: self._hung_up(number, listener.fd))

    def _hung_up(self, number: int, fd: int) -> None:
        """Forget a listener when every process behind it is gone."""
        self._threads.pop(number).join()
        self.supervisor.hung_up(number)
        os.close(fd)
        self._sessions.tell({"event": "listener-gone", "listener": number})

    def _serve_listeners(self) -> None:
        for number in self.supervisor.listeners:
            self._serve_listener(number)

    def _serve_listener(self, number: int) -> None:
        if number in self._threads:
            return
        pod, _ = self.supervisor.listeners[number]
        self._judges.setdefault(pod, Dispatcher(self.supervisor, pod))
        name = f"qgpu-pod-{number}"
        thread = threading.Thread(target=self._serve_pod, args=(number,), name=name, daemon=True)
        thread.start()  # RuntimeError where no more are to be had: then it is not taken for served
        self._threads[number] = thread

    def _amended(self, pod: str) -> None:
        self._allowances.pop(pod, None)
        self._changed()

    def _retired(self, pod: str) -> None:
        self._judges.pop(pod, None)
        self._looking.pop(pod, None)
        self.gpu_ops.closer.forget(pod)
        self._amended(pod)
        for card in self.cards.values():
            card.enforcer.forget(pod)


def _start(do: Callable[[], None], name: str) -> threading.Thread:
    """Have something done by a thread of its own, which ends with us."""
    thread = threading.Thread(target=do, name=name, daemon=True)
    thread.start()
    return thread
