"""State that all pods' dispatchers share: the object table, its journal, and what each pod may hold.

A dispatcher (``dispatcher.py``) serves one pod in a thread of its own, because a pod can make its memory slow on
purpose. Shared state lives here under one lock, which no thread holds while it waits for a pod's memory. Every object
is a claim before RM is asked to make it, so a successor finds the claim if this guardian dies in between.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import structlog

from qgpu.guardian.accounting.allocations import charged_bytes
from qgpu.guardian.accounting.memory_quota import Allowance, MemoryQuota
from qgpu.guardian.accounting.object_table import MOST_USERS, ObjectTable, RmClientEntry
from qgpu.guardian.accounting.rm_object import Fact, Key, RmObject, confirm_fact, gone_fact, object_fact
from qgpu.guardian.failover.journal import Journal, Writes
from qgpu.guardian.gpu.gpu_ops import GpuOps
from qgpu.guardian.gpu.reconciler import BATCH, Reconciler
from qgpu.guardian.proxy import client_ownership
from qgpu.guardian.proxy.bound_monitors import BoundMonitors
from qgpu.guardian.proxy.ioctl_proxy import Perform
from qgpu.guardian.proxy.listeners import Listeners
from qgpu.guardian.proxy.refusals import Refusals
from qgpu.guardian.proxy.uvm_files import UvmFile, UvmFiles
from qgpu.guardian.rules.classes import CHARGED, GATED
from qgpu.linux import fd_budget, proc
from qgpu.linux.open_file_set import FileSets
from qgpu.nvidia import abi, uvm

_log = structlog.get_logger("guardian")

#: Limits per pod. Freeing a client walks all of its pod's objects, so their number is bounded.
_MOST_OBJECTS, _MOST_CLIENTS, _MOST_PROCESSES = 100_000, 1 << 12, 1 << 12
#: How many of a pod's clients may outlive their makers, whose process numbers no other pod's process may have then.
_MOST_OUTLIVING = 256
#: How many objects a pod may share with all.
_MOST_SHARED = 1 << 13
#: This many devices of a pod are allowed even when their memory does not fit.
_FREE_DEVICES = 16
#: How many objects a client may have that moves to another pod.
_MOST_MOVED = 10_000
#: How long a call waits until the main loop has dropped all objects below one that is gone.
_FORGETTING_S, _LOOK_S = 5.0, 0.002
#: How many processes of all pods may use GPUs: a successor watches each.
_ALL_PROCESSES = 1 << 14
#: How long the search for a pod's moved UVM files rests when a process delays it.
_MOVED_AGAIN_S = 1.0
#: Stands for an unknown address; no process has addresses this high.
_SOMEWHERE, _NO_CARD = 1 << 63, b"\xff" * uvm.UUID_BYTES


@dataclass(slots=True)
class SharedState:
    """All pods' listeners, and what their calls reveal."""

    table: ObjectTable
    journal: Journal
    gpu_ops: GpuOps
    #: Open the gate over channels that are about to be freed; gate them again if RM did not free them.
    open_for_free: Callable[[list[Key]], None]
    cancel_free: Callable[[list[Key]], None]
    #: Called with every new process and its pidfd.
    watch: Callable[[int, int], None]
    clock: Callable[[], int]
    allowance: Callable[[str], Allowance] = lambda _pod: Allowance()
    #: Returns the ns until RM's lock may be held for so many ns in a pod's turn, on the cards of one of its clients.
    until_own_turn: Callable[[str, int, int], int] = lambda _pod, _client, _ns: 0
    #: Wakes the main loop.
    wake: Callable[[], None] = lambda: None
    major: int = abi.NV_MAJOR
    uvm_major: int | None = None
    uvm_layouts: Mapping[int, uvm.Layout] = field(default_factory=dict)
    #: Whether multicast objects keep memory (``Branch``).
    multicast_keeps: bool = True
    #: Device instances by the UUID that UVM uses; also, once registered, the places of MIG instances.
    uuids: Mapping[bytes, int] = field(default_factory=dict)
    perform: Perform = abi.perform
    lock: threading.RLock = field(default_factory=threading.RLock)
    listeners: Listeners = field(init=False)
    refusals: Refusals = field(init=False)
    _pod_locks: dict[str, threading.RLock] = field(default_factory=dict)
    #: What this guardian and earlier ones recorded about pods' open files.
    files: FileSets = field(default_factory=FileSets)
    #: Open files of /dev/nvidia-uvm that processes under a memory limit use.
    uvm_files: UvmFiles = field(init=False)
    monitors: BoundMonitors = field(init=False)
    quota: MemoryQuota = field(init=False)
    reconciler: Reconciler = field(init=False)
    #: By pod, when the next check of its clients may start: no other call is served during a check.
    _look_again_ns: dict[str, int] = field(default_factory=dict)
    #: By pod, the processes whose UVM files a dead guardian held, and those whose files are not at the recorded
    #: descriptors.
    _unheld: dict[str, list[int]] = field(default_factory=dict)
    #: By pod, the claims that a dead guardian did not confirm.
    _unsettled: dict[str, list[Key]] = field(default_factory=dict)
    moved: dict[str, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.listeners, self.refusals = Listeners(self.journal), Refusals(self.lock)
        self.uvm_files = UvmFiles(self.perform)
        self.monitors = BoundMonitors(
            lambda pod, fd: self.gpu_ops.closer.close(pod, fd), lambda *asked: self.until_own_turn(*asked)
        )
        allowance, look = (lambda pod: self.allowance(pod)), self._recheck_clients
        uuids, uvm_files = (lambda: self.uuids), self.uvm_files.count
        self.quota = MemoryQuota(
            self.table, self.lock, self.note, allowance, look, uuids, uvm_files, self.files.carriers
        )
        forget, wake = self._forget_vanished, (lambda: self.wake())
        self.reconciler = Reconciler(self.table, self.gpu_ops, self.note, forget, self.clock, wake)

    def note(self, fact: Fact) -> None:
        """Enter a fact in the object table and the journal."""
        self.table.note(fact)
        self.journal.append(fact)
        self._compact_journal()

    def _compact_journal(self) -> None:
        if self.journal.should_compact:
            self.journal.compact(self.table.facts())

    def record_answer(self, number: int, call: int, writes: Writes) -> None:
        """Write to the journal what a call is about to be answered with."""
        with self.lock:
            self.journal.answer(number, call, writes)
            self._compact_journal()

    def listener_closed(self, number: int) -> None:
        """Forget a listener without processes; a pod without listeners has no processes."""
        pod = self.listeners.remove(number)
        if pod not in (other for other, _ in self.listeners.values()):
            self.note({"fact": "ended", "name": pod})

    def find_uvm(self, request: int) -> int | None:
        """Return UVM's major number; the first UVM call looks it up, because UVM may be loaded after us."""
        if self.uvm_major is None and request in uvm.WATCHED:
            self.uvm_major = uvm.major()
        return self.uvm_major

    def pod_lock(self, pod: str) -> threading.RLock:
        """Return a pod's lock, held while RM's figures of its memory are read and while others duplicate its memory."""
        with self.lock:
            return self._pod_locks.setdefault(pod, threading.RLock())

    def retired(self, pod: str) -> None:
        """Forget what was counted of a pod that was retired."""
        self.refusals.forget(pod)
        self._pod_locks.pop(pod, None)
        self._look_again_ns.pop(pod, None)
        self._unheld.pop(pod, None)
        self._unsettled.pop(pod, None)
        self.moved.pop(pod, None)
        self.monitors.retired(pod)

    def resume(self) -> None:
        """Continue with a table rebuilt from a journal: watch its processes."""
        self.table.allocations.discharge_unused()
        for pid in list(self.table.processes):
            try:
                pidfd = self.gpu_ops.watch(pid)
                if proc.start_time(pid) != self.table.started[pid] != "":
                    self.gpu_ops.unwatch(pid)
                    self.note({"fact": "exit", "pid": pid})
                    continue
                self.watch(pid, pidfd)
                if pid in self.table.uvm_fds:
                    self._unheld.setdefault(self.table.processes[pid], []).append(pid)
            except (ProcessLookupError, FileNotFoundError):
                self.note({"fact": "exit", "pid": pid})
            except OSError as error:
                _log.error("a pod's process cannot be watched", pid=pid, reason=str(error))
        for rm in self.table.objects.values():
            if not rm.confirmed:
                self._unsettled.setdefault(self.table.pod_of(rm), []).append(rm.key)
            if rm.rm_class in abi.GPFIFO_CLASSES and not rm.context:
                self.reconciler.object_made(rm)

    def settle_claims(self, pod: str) -> None:
        """Ask RM about the claims of a pod that a dead guardian did not confirm, before the pod is served."""
        for key in self._unsettled.pop(pod, ()):
            if (rm := self.table.objects.get(key)) is not None and not rm.confirmed:
                self._settle_claim(rm)

    def recheck_pods(self, pods: Collection[str]) -> None:
        """Find what pods freed while there was no guardian: ask RM about all of their objects.

        This happens after the unanswered calls are finished, because those calls know best what they freed themselves.
        """
        with self.lock:
            clients = [client for pod in pods for client in self.table.clients_of(pod)]
            self.reconciler.recheck([(client, client) for client in clients], include_memory=True)

    def hold_uvm_files(self, pod: str) -> None:
        """Hold a pod's UVM files again, as the dead guardian did, before it is served; remember those that moved."""
        for pid in self._unheld.pop(pod, ()):
            for fd in list(self.table.uvm_fds.get(pid, ())):
                if not self._hold_again(pid, fd):
                    self.moved.setdefault(pod, set()).add(pid)

    def _hold_again(self, pid: int, fd: int) -> bool:
        """Hold the UVM file behind a descriptor of a process; False if it is no UVM file."""
        device = proc.device(pid, fd)
        if device is None or os.major(device) != self.find_uvm(uvm.REGISTER_GPU):
            return False
        pod = self.table.processes.get(pid)
        if pod is None:
            return False
        try:
            file = self.gpu_ops.taker.take(pod, self.gpu_ops.pidfd(pid), fd)
        except OSError as error:
            if error.errno == errno.EBUSY:  # the pod delays it
                self.moved.setdefault(pod, set()).add(pid)
            return False
        try:
            return self.hold_uvm_file(pid, fd, file)
        finally:
            self.gpu_ops.closer.close(pod, file)

    def hold_uvm_file(self, pid: int, fd: int, file: int) -> bool:
        """Hold a UVM file so that it can be emptied; False if the pod has too many or the process has ended.

        Every card is unregistered from it: a pod can change which cards a mapping names after the check.
        """
        pod = self.table.processes.get(pid, "")
        used = self.uvm_files.total + len(self.table.processes)
        more = not self.uvm_files.has(pid, file)
        if more and not fd_budget.within_fair_share(self.uvm_files.count(pod), fd_budget.headroom(used)):
            return False
        if (known := self.uvm_files.hold(pod, pid, fd, file, self.uuids)) is None:
            return False
        with self.lock:
            if pid in self.table.processes:
                if known not in self.table.uvm_fds.get(pid, ()):
                    self.note({"fact": "uvm_file", "pid": pid, "fd": known, "there": True})
                return True
        self.uvm_files.release(self.uvm_files.take(pid))  # the process ended before its file was held
        return False

    def has_only_uvm_file(self, pid: int, file: int) -> bool:
        """Tell whether a process has cards registered on this UVM file alone, also of what a dead guardian held."""
        return len(self.table.uvm_fds.get(pid, ())) == 1 and self.uvm_files.has_only(pid, file)

    def find_moved_uvm_files(self, pod: str) -> None:
        """Search a pod's processes for UVM files that moved since a dead guardian recorded them. Takes long."""
        while moved := self.moved.get(pod):
            pid = moved.pop()
            for fd, device in proc.devices(pid):
                if os.major(device) == self.find_uvm(uvm.REGISTER_GPU):
                    self._hold_again(pid, fd)
            if pid in moved:
                time.sleep(_MOVED_AGAIN_S)
        self.moved.pop(pod, None)

    # -- processes and clients ----------------------------------------------------------------------------------

    def register_process(self, pod: str, pid: int) -> None:
        """Enter a process in the object table. Raises OSError when it has ended, or EAGAIN.

        For a moment a pid can still be that of another pod's process that has ended. It stays that of the process that
        made a client, for as long as the client exists: RM lets UVM map the client's memory for whoever has the pid.
        """
        with self.lock:
            if self.table.processes.get(pid, pod) != pod:
                raise OSError(errno.EAGAIN, "its pid is still that of a process of another pod, which has just ended")
            if pid not in self.table.processes:
                if self.table.ended_processes.made_for_others(pid, pod):
                    raise OSError(errno.EAGAIN, "its pid is that of a process that made a client of another pod")
                own, every = self.table.processes_of(pod), len(self.table.processes)
                remaining = min(fd_budget.headroom(every), _ALL_PROCESSES - every)
                if own >= _MOST_PROCESSES or not fd_budget.within_fair_share(own, remaining):
                    raise OSError(errno.EAGAIN, "too many processes of the pod use GPUs")
                pidfd = self.gpu_ops.watch(pid)
                started = proc.start_time(pid)
                self.watch(pid, pidfd)
                self.note({"fact": "process", "pid": pid, "pod": pod, "started": started})

    def register_client(self, pid: int, fd: int, file: int, client: int, *, made_here: bool = False) -> bool:
        """Enter a client in the object table; False if RM does not know it on this file, or if it is another pod's.

        A client belongs to the pod that made it, even when another pod uses the file: the maker pays. Once its process
        has ended, and no other one of that pod has the file, the client belongs to the pod that uses it, if its memory
        fits there. The same holds when RM has reused the handle. ``made_here`` says that the guardian has just made it.
        Nobody but the process that made a client may use it first: RM lets UVM map a client's memory for that process
        alone, so what UVM may keep is looked for there. While the pod that has a client has the file, no other does.
        """
        pod, entry = self.table.processes.get(pid, ""), self.table.clients.get(client)
        remade = entry is not None and entry.pod == pod and not made_here and self._is_remade(entry, pid, file)
        if entry is not None and entry.pod == pod and (pid, fd) in entry.users and not made_here and not remade:
            return True
        if self.gpu_ops.object_info(file, client, client) is None:
            return False
        if remade:
            with self.lock:
                if self.table.clients.get(client) is entry and not self._drop_vanished((client, client)):
                    return False
            entry = self.table.clients.get(client)
        if entry is not None and entry.pod != pod and not self.gpu_ops.pod_has_file(client, entry.pod, file):
            reused = self.files.makers.is_by(file, pid)
            if not reused and self._may_be_mapped_by_maker(entry):
                self.refusals.count(pod, client_ownership.OTHER_PROCESS)
                return False
            if not self._can_move(client):
                self.refusals.count(pod, "another pod's client with too many objects")
                return False
            if not self._move(client, pod, pid, fd, reused=reused, made_here=made_here):
                self.refusals.count(pod, "another pod's memory over the limit")
                return False
        elif not made_here and not (entry.pod == pod if entry is not None else self.files.makers.is_by(file, pid)):
            self.refusals.count(pod, client_ownership.OTHER_PROCESS)
            return False
        elif entry is None and not self.may_have_another_client(pod):
            return False
        elif entry is None or made_here or len(entry.users) < MOST_USERS:
            with self.lock:
                how = {"made_here": True} if made_here else {}
                self.note({"fact": "client", "client": client, "pid": pid, "fd": fd} | how)
        return self.owns(pod, client)

    def _is_remade(self, entry: RmClientEntry, pid: int, file: int) -> bool:
        """Tell whether a pod's client is gone, and this process has made another one of its handle on a file.

        A file with a client that the guardian made is one on which the kernel makes nothing more.
        """
        if entry.made_here:
            return not self.files.devices.has(file)
        return entry.maker != pid and self.files.makers.is_by(file, pid)

    def _can_move(self, client: int) -> bool:
        """Tell whether a client has few enough objects to move to another pod at once; wait for those that are gone."""
        if self.table.handles_of(client) > _MOST_MOVED:
            self.reconciler.recheck([(client, client)], include_memory=True)
            _wait_until(lambda: self.table.handles_of(client) <= _MOST_MOVED)
        return self.table.handles_of(client) <= _MOST_MOVED

    def _may_be_mapped_by_maker(self, entry: RmClientEntry) -> bool:
        """Tell whether the process that made a client, and that alone, can still map its memory, or has done so."""
        alive = self.table.processes.get(entry.maker) == entry.pod
        return alive or not self.uvm_files.has_none(entry.maker)

    def _move(self, client: int, pod: str, pid: int, fd: int, *, reused: bool, made_here: bool) -> bool:
        """Move a client to a pod, with its memory; False if that exceeds a limit of the pod.

        If RM has reused the client's handle, it no longer has that memory. So RM is asked about it before the refusal.
        """
        if not self._has_room(pod, client):
            counted = 0

            def fits_by_now() -> bool:
                nonlocal counted
                if (count := self.table.handles_of(client)) == counted:
                    return False
                counted = count
                return self._has_room(pod, client)

            self._recheck_clients(pod)
            with self.lock:
                self.reconciler.recheck([(client, client)], include_memory=True)
            _wait_until(fits_by_now)
        with self.lock:  # more may have come meanwhile
            if self.table.handles_of(client) > _MOST_MOVED or not self._has_room(pod, client):
                return False
            self.gpu_ops.lost.discard(client)
            maker = {"maker": pid, "made_here": made_here} if reused else {}
            self.note({"fact": "owner", "client": client, "pod": pod, "pid": pid, "fd": fd} | maker)
            self.reconciler.recheck([(client, client)], include_memory=True)
            return True

    def _has_room(self, pod: str, client: int) -> bool:
        """Tell whether the memory that moves with a client fits a pod, and lies on the pod's own cards.

        A multicast object may keep more memory of its pod, so it does not move. This takes as long as the client has
        objects, so it needs no lock.
        """
        by_handle, moved = self.table.allocations.by_handle, self.table.below((client, client))
        if self.multicast_keeps and any(rm.rm_class == abi.NV_MEMORY_MULTICAST_FABRIC for rm in moved):
            return False
        behind = (by_handle.get(rm.key) for rm in moved)
        moving: Counter[int] = Counter()
        for memory in {memory.number: memory for memory in behind if memory is not None}.values():
            # As ``Allocations.transfer``: what has a handle in another client stays where it is.
            if memory.pod != pod and all(each == client for each, _ in tuple(memory.handles)):
                moving[memory.instance] += charged_bytes(memory.size)
        minors = self.allowance(pod).minors
        return all(place in minors and not self.quota.over_limit(pod, place, more) for place, more in moving.items())

    def may_have_another_client(self, pod: str) -> bool:
        """Tell whether a pod has fewer clients than a pod may have; count the refusal if not."""
        clients = self.table.clients_of(pod)
        entries = (self.table.clients.get(client) for client in clients)
        outliving = sum(entry is not None and entry.maker not in self.table.processes for entry in entries)
        if len(clients) < _MOST_CLIENTS and outliving < _MOST_OUTLIVING:
            return True
        self.refusals.count(pod, "too many clients of RM")
        return False

    def record_file_found(self, client: int, pid: int, fd: int) -> bool:
        """Record a descriptor that leads to a client; False if its process cannot be watched."""
        with self.lock:
            if (entry := self.table.clients.get(client)) is None:
                return False
            try:
                self.register_process(entry.pod, pid)
            except OSError:
                return False
            self.note({"fact": "reached", "client": client, "pid": pid, "fd": fd})
            return True

    def share_with_all(self, client: int, handle: int, *, there: bool) -> bool:
        """Record that a pod shares an object with all, or no longer; ALL_OBJECTS of a client. False for too many."""
        with self.lock:
            entry = self.table.clients.get(client)
            if entry is None or (there and self.table.shared_counts[entry.pod] >= _MOST_SHARED):
                return False
            self.note({"fact": "shared", "client": client, "handle": handle, "there": there})
            return True

    def record_unrestorable(self, client: int, what: str) -> None:
        """Record that a client gets something that a checkpoint cannot restore; before RM gives it."""
        with self.lock:
            if (entry := self.table.clients.get(client)) is not None and what not in entry.unrestorable:
                self.note({"fact": "unrestorable", "client": client, "what": what})

    def monitors_bound(self, pod: str, pid: int, client: int, profiler: int, file: int) -> None:
        """Remember that a process has bound the card's monitors by a profiler of a client."""
        with self.lock:
            self.monitors.bound(pod, pid, client, profiler, file)
            if pid not in self.table.processes:  # killed meanwhile
                self.monitors.exited(pid)

    def owns(self, pod: str, client: int) -> bool:
        """Tell whether a client belongs to a pod."""
        entry = self.table.clients.get(client)
        return entry is not None and entry.pod == pod

    def exited(self, pid: int) -> bool:
        """Forget a process that has ended; its clients stay until RM drops them: their files may be open elsewhere.

        Return True if scheduling may change. Processes without channels come and go by the hundred and change nothing.
        """
        with self.lock:
            self.quota.exited(pid)
            used = self.table.clients_used_by(pid)
            self.reconciler.recheck([(client, client) for client in used])
            self.note({"fact": "exit", "pid": pid})
            self.monitors.exited(pid)
            self.gpu_ops.unwatch(pid)
            return any(map(self.table.has_channels, used))

    # -- objects --------------------------------------------------------------------------------------------------

    def claim(self, rm: RmObject, number: int | None = None) -> int:
        """Charge an object before RM makes it; return NV_OK, or the RM status of the refusal.

        ``number`` is the allocation that gets another handle. Call it without the lock.
        """
        status = self._claim(rm, number)
        entry = self.table.clients.get(rm.client)
        if status == abi.NV_ERR_NO_MEMORY and entry is not None and self._recheck_clients(entry.pod):
            status = self._claim(rm, number)
        return status

    def _claim(self, rm: RmObject, number: int | None) -> int:
        with self.lock:
            there = self.table.objects.get(rm.key)
            if there is not None and there.confirmed and not self.gpu_ops.exists(rm.key):
                if not self._drop_vanished(rm.key):
                    return abi.NV_ERR_INSUFFICIENT_RESOURCES
            elif there is not None:
                return abi.NV_ERR_INVALID_ARGUMENT
            entry = self.table.clients.get(rm.client)
            if entry is not None and (
                self.table.counts[entry.pod] >= _MOST_OBJECTS or not self.quota.may_record(entry.pod)
            ):
                self.refusals.count(entry.pod, "too many objects of RM")
                return abi.NV_ERR_INSUFFICIENT_RESOURCES
            copied = rm.rm_class == abi.NV_MEMORY_FABRIC and rm.detail > 0
            charged = rm.rm_class in CHARGED or self.table.stands_alone(rm) or copied
            if charged and number is None:
                number = self.table.allocations.next_number()
            self.note(object_fact(rm) | ({"memory": number} if number is not None else {}))
            if rm.key not in self.table.objects:
                return abi.NV_ERR_INVALID_ARGUMENT
            memory = self.table.allocations.by_handle.get(rm.key)
            pod = self.table.pod_of(rm)
            more_devices = rm.rm_class == abi.NV01_DEVICE_0 and self.table.device_counts[pod] > _FREE_DEVICES
            if more_devices and self.quota.over_limit(pod, rm.detail):
                status = abi.NV_ERR_NO_MEMORY
            elif not charged:
                return abi.NV_OK
            elif memory is None:  # no known device above it, so no card to charge
                status = abi.NV_ERR_INVALID_STATE
            elif memory.instance not in self.allowance(memory.pod).minors:
                status = abi.NV_ERR_INSUFFICIENT_PERMISSIONS
            elif self.quota.over_limit(memory.pod, memory.instance):
                status = abi.NV_ERR_NO_MEMORY
            else:
                return abi.NV_OK
            self.note(gone_fact(rm.key))
            return status

    def confirm(self, key: Key, size: int | None = None) -> bool:
        """Confirm an object that RM has made, memory at its true size; False if it does not fit and must be freed.

        It stays charged until then. One without its claim must be freed, too: its client has become another pod's
        meanwhile, or is gone.
        """
        with self.lock:
            rm = self.table.objects.get(key)
            if rm is None:
                return False
            if size is not None and size != rm.detail:
                self._note_size(rm, size)
            self.note(confirm_fact(key))
            self.reconciler.object_made(rm)
        return size is None or size <= rm.detail or self._fits(key)

    def _fits(self, key: Key) -> bool:
        """Tell whether a pod is within its limit with the memory that is charged under a handle."""
        memory = self.table.allocations.by_handle.get(key)
        return memory is None or self.quota.fits(memory.pod, [memory.instance])

    def _note_size(self, rm: RmObject, size: int) -> None:
        """Enter memory in the object table again, at its true size in bytes."""
        memory = self.table.allocations.by_handle.get(rm.key)
        self.note(gone_fact(rm.key))
        fact = object_fact(RmObject(rm.client, rm.handle, rm.parent, rm.rm_class, size))
        self.note(fact | ({"memory": memory.number} if memory is not None else {}))

    def set_instance(self, device: RmObject, instance: int) -> bool:
        """Record which card a device is on; False if its address space does not fit on that card.

        The first few devices of a pod always fit, because a program needs one to ask about a full card.
        """
        with self.lock:
            found = RmObject(device.client, device.handle, device.parent, device.rm_class, instance)
            self.note(object_fact(found))
            self.note(confirm_fact(device.key))
            pod = self.table.pod_of(found)
        return self.table.device_counts[pod] <= _FREE_DEVICES or self.quota.fits(pod, [instance])

    def cancel_claim(self, key: Key) -> None:
        """Take a claim back."""
        with self.lock:
            if (rm := self.table.objects.get(key)) is not None and not rm.confirmed:
                self.note(gone_fact(key))

    def begin_free(self, key: Key, file: int) -> list[Key]:
        """Open the gates over the channels to be freed, because a free may wait for queued work; return the channels.

        Gates open only if RM can free the object through this file. Otherwise a pod could use frees to open its gate.
        """
        with self.lock:
            channels = self.table.channels_below(key)
        if not channels or self.gpu_ops.object_info(file, key[0], key[1]) is None:
            return []
        self.open_for_free(channels)
        return channels

    def end_free(self, key: Key, was: RmObject | None, channels: list[Key], *, gone: bool) -> None:
        """Forget what RM has freed, or gate the channels again if RM freed nothing.

        ``was`` is what the table had before: a client's own pod may have made another object by now, of the handle that
        another pod with the client's file has freed.
        """
        with self.lock:
            if not gone:
                self.cancel_free(channels)
                self.wake()
                return
            rm = self.table.objects.get(key)
            if rm is not was or (rm is None and key[0] != key[1]):
                return
            many = self.table.count_below(key, BATCH) > BATCH
            if many:
                self.reconciler.forget_freed(key)
            else:
                self.note(gone_fact(key))
            if rm is not None and rm.rm_class in {abi.FERMI_VASPACE_A, abi.FERMI_CONTEXT_SHARE_A}:
                self.reconciler.recheck([(key[0], key[0])])  # RM frees channels together with their address space
            if channels or rm is None or rm.rm_class in GATED:
                self.reconciler.tsgs_changed()
        if many:
            self._wait_until_forgotten(key)

    def _wait_until_forgotten(self, key: Key) -> None:
        """Wait until the freed memory is no longer charged, so that the pod can allocate as much again."""
        known: Collection[object] = self.table.clients if key[0] == key[1] else self.table.objects
        _wait_until(lambda: (key[0] if key[0] == key[1] else key) not in known)

    def release_closed_uvm_files(self, pod: str) -> bool:
        """Empty the UVM files that a pod has closed; False if there are none. Call it without the lock."""
        with self.lock:
            pids = self.table.pids_of(pod)
        closed = self.uvm_files.take_closed(pids)
        for pid, files in closed.items():
            self.uvm_files.release(files)
            with self.lock:
                self.uvm_files_released(pid, files)
        return bool(closed)

    def forget_previous_program(self, pod: str, pid: int) -> None:
        """Forget what a process held before exec, before it gets a UVM file that could keep memory."""
        self.release_closed_uvm_files(pod)
        with self.lock:
            own = [client for client in self.table.clients_of(pod) if self.table.clients[client].maker == pid]
        self._drop_vanished_clients(own)

    def uvm_files_released(self, pid: int, files: Iterable[UvmFile]) -> None:
        """Record that UVM files of a process are empty; without any other file, nothing of it is mapped."""
        for each in files:
            if not self.uvm_files.has_at(pid, each.theirs):  # it may be registered again by now
                self.note({"fact": "uvm_file", "pid": pid, "fd": each.theirs, "there": False})
        if self.uvm_files.has_none(pid):
            self.quota.unmap(pid, 0, 1 << 64, None)

    def _recheck_clients(self, pod: str) -> bool:
        """Drop a pod's clients that RM no longer has, for at most a tenth of the time; True if there were any.

        Call it without the lock: a pod can have thousands of clients.
        """
        with self.lock:
            began_ns, clients = self.clock(), self.table.clients_of(pod)
            if began_ns < self._look_again_ns.get(pod, 0):
                return False
        dropped = self._drop_vanished_clients(clients)
        with self.lock:
            self._look_again_ns[pod] = self.clock() + 9 * (self.clock() - began_ns)
        return dropped

    def _drop_vanished_clients(self, clients: Iterable[int]) -> bool:
        """Drop the clients among these that RM no longer has; True if there were any. Call it without the lock."""
        most = BATCH
        for client in clients:
            if self.gpu_ops.exists((client, client)):
                continue
            with self.lock:  # RM may have given the handle to another client by now
                if client in self.table.clients and not self.gpu_ops.exists((client, client)):
                    most -= self._drop_vanished((client, client), most)
        return most < BATCH

    def _drop_vanished(self, key: Key, most: int = BATCH) -> int:
        """Drop what RM no longer has, and return how much; 0 if it is more than ``most`` and goes step by step.

        No other call is served meanwhile, and the daemon takes a guardian that answers nobody for hung.
        """
        count = self.table.count_below(key, most) or 1
        if count > most:
            self.reconciler.forget_vanished(key)
            return 0
        self._forget_vanished(key)
        return count

    def _forget_vanished(self, key: Key) -> None:
        """Drop an object that RM no longer has although no call freed it, for example because its file was closed.

        If its maker has a UVM file, that file may keep the memory: the maker may have a mapping that was never
        reported. The memory then stays charged as mapped.
        """
        entry = self.table.clients.get(key[0])
        if entry is not None and not self.uvm_files.has_none(entry.maker):
            limits = self.allowance(entry.pod).limits
            for memory in self.table.ending_with(key):
                if memory.instance in limits:
                    self.quota.map(entry.maker, _SOMEWHERE + memory.number, 1, [_NO_CARD], next(iter(memory.handles)))
        self.note(gone_fact(key))

    def _settle_claim(self, rm: RmObject) -> None:
        """Find out what became of a claim that a dead guardian left."""
        found = self.gpu_ops.find_object(rm)
        if (found is None and not self.gpu_ops.exists(rm.key)) or (found is not None and found[0] != rm.rm_class):
            self.cancel_claim(rm.key)
            return
        size = self.gpu_ops.size(rm) if rm.rm_class == abi.NV01_MEMORY_LOCAL_USER else None
        self.confirm(rm.key, size)


def _wait_until(done: Callable[[], bool]) -> None:
    """Wait for the main loop to drop objects, for a while."""
    until = time.monotonic() + _FORGETTING_S
    while not done() and time.monotonic() < until:
        time.sleep(_LOOK_S)
