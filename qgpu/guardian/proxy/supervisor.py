"""What all pods' judges share: the register, its journal, and what a pod may hold.

A judge (``judge.py``) knows one pod's calls and has a thread of its own, for a pod's memory may be slow on purpose;
what it learns and asks comes here, under one lock that is never held while a pod's memory is waited for. Every object
is a claim before RM is asked to make it, so that a successor finds it should we die in between.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from qgpu.errors import RefusedError
from qgpu.guardian.accounting.memory_quota import Allowance, MemoryQuota
from qgpu.guardian.accounting.object_table import MOST_USERS, Fact, Key, ObjectTable, RmObject, object_fact
from qgpu.guardian.failover.journal import Journal, Writes
from qgpu.guardian.gpu.gpu_ops import GpuOps
from qgpu.guardian.gpu.reconciler import AT_ONCE, Reconciler
from qgpu.guardian.proxy.ioctl_proxy import Perform
from qgpu.guardian.proxy.uvm_files import UvmFile, UvmFiles
from qgpu.guardian.rules.classes import CHARGED, GATED
from qgpu.linux import fd_budget, proc
from qgpu.linux.open_file_set import FileSets
from qgpu.linux.seccomp_notify import Listener, UnansweredCall, read_slot
from qgpu.nvidia import abi, uvm
from qgpu.nvidia.rm_client import take

_log = structlog.get_logger("guardian")

#: A pod that has more than this is refused the next: all of them are gone through when a client of its goes.
_MOST_OBJECTS, _MOST_CLIENTS, _MOST_PROCESSES = 100_000, 1 << 12, 1 << 12
_MOST_KINDS = 64
#: So many devices a pod may have although they do not fit.
_FREE_DEVICES = 16
#: How long a pod's call waits until the main loop has forgotten all that it has freed.
_FORGETTING_S, _LOOK_S = 5.0, 0.002
#: Stands for an address that is not known; no process has such ones.
_SOMEWHERE, _NO_CARD = 1 << 63, b"\xff" * uvm.UUID_BYTES


@dataclass(slots=True)
class Supervisor:
    """All pods' listeners and what is learned through them."""

    table: ObjectTable
    journal: Journal
    gpu_ops: GpuOps
    #: Told of channels about to be freed, and of those that were not freed after all.
    leave: Callable[[list[Key]], None]
    stayed: Callable[[list[Key]], None]
    #: Told of every new process, with its pidfd.
    watch: Callable[[int, int], None]
    clock: Callable[[], int]
    allowance: Callable[[str], Allowance] = lambda _pod: Allowance()
    #: Told that something became due.
    wake: Callable[[], None] = lambda: None
    major: int = abi.NV_MAJOR
    uvm_major: int | None = None
    uvm_layouts: Mapping[int, uvm.Layout] = field(default_factory=dict)
    #: The instances of cards by their UUID, as UVM names them.
    uuids: Mapping[bytes, int] = field(default_factory=dict)
    perform: Perform = abi.perform
    listeners: dict[int, tuple[str, Listener]] = field(default_factory=dict)
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)
    lock: threading.RLock = field(default_factory=threading.RLock)
    _books: dict[str, threading.RLock] = field(default_factory=dict)
    #: What is remembered of pods' open files, by this guardian and the ones before it.
    files: FileSets = field(default_factory=FileSets)
    #: UVM's files of processes under a limit.
    uvm_files: UvmFiles = field(init=False)
    quota: MemoryQuota = field(init=False)
    reconciler: Reconciler = field(init=False)
    _kinds: Counter[str] = field(default_factory=Counter)
    #: By pod, when RM may be asked next which of its clients are there: nobody else is served meanwhile.
    _look_again_ns: dict[str, int] = field(default_factory=dict)
    _next_listener: int = 1
    #: Processes that have moved files of UVM's.
    _moved: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.uvm_files = UvmFiles(self.perform)
        allowance, look = (lambda pod: self.allowance(pod)), self._look_for_clients
        uuids, uvm_files = (lambda: self.uuids), self.uvm_files.count
        self.quota = MemoryQuota(
            self.table, self.lock, self.note, allowance, look, uuids, uvm_files, self.files.carriers
        )
        self.reconciler = Reconciler(
            self.table, self.gpu_ops, self.note, self._vanished, self._dropped, self.clock, lambda: self.wake()
        )

    def note(self, fact: Fact) -> None:
        """Take a fact into register and journal."""
        self.table.note(fact)
        self.journal.append(fact)
        self._see_to_journal()

    def _see_to_journal(self) -> None:
        if self.journal.grown:
            self.journal.compact(self.table.facts())

    def listen(self, pod: str, fd: int, number: int | None = None) -> int:
        """Take over a pod's listener and return the number it goes by. Raises RefusedError.

        A pod that has more than its share gets no new one; those of a dead guardian are taken over all the same.
        """
        if number is None:
            own = sum(other == pod for other, _ in self.listeners.values())
            if not fd_budget.is_fair(own, self.journal.free_slots):
                raise RefusedError(f"pod {pod}: {own} of its process trees are watched already; end some first")
        number = self._next_listener if number is None else number
        self._next_listener = max(self._next_listener, number + 1)
        self.listeners[number] = (pod, Listener(fd, self.journal.slot(number), number))
        return number

    def living(self) -> set[str]:
        """Name the pods with a process behind a listener of theirs."""
        found: set[str] = set()
        for pod, listener in self.listeners.values():
            if pod not in found and listener.has_somebody():
                found.add(pod)
        return found

    def left_in_hand(self, number: int) -> UnansweredCall | None:
        """Return the call of a listener that a dead guardian received and did not answer."""
        return read_slot(self.journal.slot(number))

    def answers(self, number: int, call: int, writes: Writes) -> None:
        """Write down what a call that was carried out is about to be answered with."""
        with self.lock:
            self.journal.answer(number, call, writes)
            self._see_to_journal()

    def hung_up(self, number: int) -> None:
        """Forget a listener behind which nobody is left; with its last one, a pod has no process any more."""
        pod, _ = self.listeners.pop(number)
        self.journal.release(number)
        if pod not in (other for other, _ in self.listeners.values()):
            self.note({"fact": "ended", "name": pod})

    def find_uvm(self, request: int) -> int | None:
        """Return UVM's major number, looked up when first a call of UVM's is made: it may be loaded after us."""
        if self.uvm_major is None and request in uvm.WATCHED:
            self.uvm_major = uvm.major()
        return self.uvm_major

    def books(self, pod: str) -> threading.RLock:
        """Return what is held while RM's figures of a pod's private memory are read, or others make handles on it."""
        with self.lock:
            return self._books.setdefault(pod, threading.RLock())

    def refused(self, pod: str, what: str) -> None:
        """Count a refusal, by its kind; there are so many kinds that a pod may not have all of them named."""
        with self.lock:
            if (pod, what) not in self.refusals:
                if self._kinds[pod] >= _MOST_KINDS:
                    what = "other calls"
                self._kinds[pod] += 1
            self.refusals[pod, what] += 1

    def retired(self, pod: str) -> None:
        """Forget what was counted of a pod that is no more."""
        self._kinds.pop(pod, None)
        self._books.pop(pod, None)
        self._look_again_ns.pop(pod, None)
        for key in [key for key in self.refusals if key[0] == pod]:
            del self.refusals[key]

    def resume(self) -> None:
        """Go on with a register rebuilt from a journal: watch its processes, ask RM about open claims."""
        self.table.allocations.settle()
        for pid in list(self.table.processes):
            try:
                self.watch(pid, self.gpu_ops.watch(pid))
                self._hold_uvm_files(pid)
            except (ProcessLookupError, FileNotFoundError):
                self.note({"fact": "exit", "pid": pid})
            except OSError as error:
                _log.error("a pod's process cannot be watched", pid=pid, reason=str(error))
        for rm in [rm for rm in self.table.objects.values() if not rm.confirmed]:
            self._settle_claim(rm)
        for rm in self.table.objects.values():
            if rm.rm_class in abi.GPFIFO_CLASSES and not rm.context:
                self.reconciler.made(rm)

    def look_over(self, pods: Collection[str]) -> None:
        """Find out what of pods was freed while nobody looked, by asking about everything.

        Only when the calls that a dead guardian had in hand are settled: what one of them frees is known best there.
        """
        with self.lock:
            clients = [client for pod in pods for client in self.table.clients_of(pod)]
            self.reconciler.doubt([(client, client) for client in clients], of_memory=True)

    def _hold_uvm_files(self, pid: int) -> None:
        """Hold UVM's files of a process again, as a dead guardian did; those that it has moved are searched for."""
        for fd in list(self.table.uvm_fds.get(pid, ())):
            if not self._hold_uvm_file(pid, fd):
                self._moved.add(pid)

    def _hold_uvm_file(self, pid: int, fd: int) -> bool:
        """Hold one of UVM's files of a process; False where there is none."""
        device = proc.device(pid, fd)
        if device is None or os.major(device) != self.find_uvm(uvm.REGISTER_GPU):
            return False
        pod = self.table.processes.get(pid)
        if pod is None:
            return False
        with suppress(OSError):
            file = take(self.gpu_ops.pidfd(pid), fd)
            try:
                return self.keep_uvm_file(pid, fd, file, self.uuids)
            finally:
                self.gpu_ops.closer.close(pod, file)
        return False

    def keep_uvm_file(self, pid: int, fd: int, file: int, cards: Iterable[bytes]) -> bool:
        """Hold a file of UVM's, so that it can be emptied; False where a pod has too many, or the process has ended."""
        pod = self.table.processes.get(pid, "")
        own = sum(map(self.uvm_files.count, self.table.pids_of(pod)))
        used = self.uvm_files.total + len(self.table.processes)
        if not fd_budget.is_fair(own, fd_budget.left(used)) or not self.uvm_files.keep(pid, fd, file, cards):
            return False
        with self.lock:
            if pid in self.table.processes:
                if fd not in self.table.uvm_fds.get(pid, ()):
                    self.note({"fact": "uvm_file", "pid": pid, "fd": fd, "there": True})
                return True
        self.uvm_files.release(self.uvm_files.take(pid))  # its end was heard before it was held
        return False

    def find_moved(self) -> None:
        """Search processes for files of UVM's that are not where a dead guardian had seen them. Takes long."""
        while self._moved:
            pid = self._moved.pop()
            for fd, device in proc.devices(pid):
                if os.major(device) == self.find_uvm(uvm.REGISTER_GPU):
                    self._hold_uvm_file(pid, fd)

    # -- processes and clients ----------------------------------------------------------------------------------

    def know_process(self, pod: str, pid: int) -> None:
        """Make sure a process is in the register. Raises OSError when it is gone."""
        with self.lock:
            if pid not in self.table.processes:
                own = len(self.table.pids_of(pod))
                if own >= _MOST_PROCESSES or not fd_budget.is_fair(own, fd_budget.left(len(self.table.processes))):
                    raise OSError(errno.EAGAIN, "the pod has as many processes on GPUs as it may")
                self.watch(pid, self.gpu_ops.watch(pid))
                self.note({"fact": "process", "pid": pid, "pod": pod})

    def know_client(self, pid: int, fd: int, file: int, client: int) -> bool:
        """Make sure a client is in the register; False when it is none of this file's, by RM's word, or another pod's.

        A file that another pod has passed on has that pod's clients: it pays for them. When nothing of that pod's leads
        to the client any more, it is the pod's that has the file: also where RM has given the client's name out again.
        """
        pod, entry = self.table.processes.get(pid, ""), self.table.clients.get(client)
        if entry is not None and entry.pod == pod and (pid, fd) in entry.users:
            return True
        if self.gpu_ops.about(file, client, client) is None:
            return False
        if entry is not None and entry.pod != pod and not self.gpu_ops.is_reached(client, entry.pod, file):
            with self.lock:
                self.gpu_ops.lost.discard(client)
                self.note({"fact": "owner", "client": client, "pod": pod, "pid": pid, "fd": fd})
                self.reconciler.doubt([(client, client)], of_memory=True)
        elif entry is None and len(self.table.clients_of(pod)) >= _MOST_CLIENTS:
            self.refused(pod, "more clients than are kept")
            return False
        elif entry is None or len(entry.users) < MOST_USERS:
            with self.lock:
                self.note({"fact": "client", "client": client, "pid": pid, "fd": fd})
        return self.owns(pod, client)

    def reached(self, client: int, pid: int, fd: int) -> bool:
        """Take note of a descriptor that leads to a client; False where its process can't be watched."""
        with self.lock:
            if (entry := self.table.clients.get(client)) is None:
                return False
            try:
                self.know_process(entry.pod, pid)
            except OSError:
                return False
            self.note({"fact": "reached", "client": client, "pid": pid, "fd": fd})
            return True

    def owns(self, pod: str, client: int) -> bool:
        """Tell whether a client is one of a pod's."""
        entry = self.table.clients.get(client)
        return entry is not None and entry.pod == pod

    def exited(self, pid: int) -> bool:
        """Forget a process that has ended; its clients go when RM says so, for their files may be elsewhere.

        True where that may matter to who is scheduled: processes that use no card can come and go by the hundred.
        """
        with self.lock:
            self.quota.exited(pid)
            used = self.table.clients_used_by(pid)
            pod = self.table.processes.get(pid, "")
            self.reconciler.doubt([(client, client) for client in used])
            self.note({"fact": "exit", "pid": pid})
            self.gpu_ops.unwatch(pid)
            return any(map(self.table.has_channels, used)) or not self.table.pids_of(pod)

    # -- objects --------------------------------------------------------------------------------------------------

    def claim(self, rm: RmObject, number: int | None = None) -> int:
        """Charge what RM is about to be asked for, or say with which status of RM's it is refused.

        ``number`` is that of memory which gets a further handle.
        """
        with self.lock:
            there = self.table.objects.get(rm.key)
            if there is not None and not self.gpu_ops.exists(rm.key):
                if not self._lost(rm.key):
                    return abi.NV_ERR_INSUFFICIENT_RESOURCES
            elif there is not None:
                return abi.NV_ERR_INVALID_ARGUMENT
            entry = self.table.clients.get(rm.client)
            if entry is not None and self.table.counts[entry.pod] >= _MOST_OBJECTS:
                self.refused(entry.pod, "more objects than are kept")
                return abi.NV_ERR_INSUFFICIENT_RESOURCES
            charged = rm.rm_class in CHARGED
            if charged and number is None:
                number = self.table.allocations.next_number()
            self.note(object_fact(rm) | ({"memory": number} if number is not None else {}))
            if rm.key not in self.table.objects:
                return abi.NV_ERR_INVALID_ARGUMENT
            memory = self.table.allocations.by_handle.get(rm.key)
            if rm.rm_class == abi.NV01_DEVICE_0 and not self._device_fits(self.table.pod_of(rm), rm.detail):
                status = abi.NV_ERR_NO_MEMORY
            elif not charged:
                return abi.NV_OK
            elif memory is None:  # below no device that is known: there is no card to charge
                status = abi.NV_ERR_INVALID_STATE
            elif memory.instance not in self.allowance(memory.pod).minors:
                status = abi.NV_ERR_INSUFFICIENT_PERMISSIONS
            elif self.quota.over_limit(memory.pod, memory.instance):
                status = abi.NV_ERR_NO_MEMORY
            else:
                return abi.NV_OK
            self.note(_gone(rm.key))
            return status

    def made(self, key: Key, size: int | None = None) -> bool:
        """Confirm what RM has made, memory at its true size; False when that does not fit and it must be freed."""
        with self.lock:
            rm = self.table.objects.get(key)
            if rm is None:
                return True
            if size is not None and size != rm.detail and self._resize(rm, size):
                self.note(_gone(key))
                return False
            self.note({"fact": "confirm", "client": key[0], "handle": key[1], "context": 0})
            self.reconciler.made(rm)
            return True

    def _resize(self, rm: RmObject, size: int) -> bool:
        """Charge memory at its true size; True when that is over the limit."""
        number = self.table.allocations.by_handle[rm.key].number
        larger = size > rm.detail
        rm = RmObject(rm.client, rm.handle, rm.parent, rm.rm_class, size)
        self.note(_gone(rm.key))
        self.note(object_fact(rm) | {"memory": number})
        memory = self.table.allocations.by_handle.get(rm.key)
        return larger and memory is not None and self.quota.over_limit(memory.pod, memory.instance)

    def learned(self, device: RmObject, instance: int) -> bool:
        """Take note of which card a device is on; False when its address space does not fit there.

        Some devices always fit: who only asks what a full card shows needs one.
        """
        with self.lock:
            found = RmObject(device.client, device.handle, device.parent, device.rm_class, instance)
            self.note(object_fact(found))
            self.note({"fact": "confirm", "client": device.client, "handle": device.handle, "context": 0})
            return self._device_fits(self.table.pod_of(found), instance)

    def _device_fits(self, pod: str, instance: int) -> bool:
        return self.table.device_counts[pod] <= _FREE_DEVICES or not self.quota.over_limit(pod, instance)

    def not_made(self, key: Key) -> None:
        """Take a claim back."""
        with self.lock:
            if (rm := self.table.objects.get(key)) is not None and not rm.confirmed:
                self.note(_gone(key))

    def freeing(self, key: Key, file: int) -> list[Key]:
        """Open the gates over what is about to be freed, for a free may wait for queued work; return the channels.

        Only where RM can free it through that file: else asking for it would be a way to have gates opened.
        """
        with self.lock:
            channels = self.table.channels_below(key)
        if not channels or self.gpu_ops.about(file, key[0], key[1]) is None:
            return []
        self.leave(channels)
        return channels

    def freed(self, key: Key, channels: list[Key], *, gone: bool) -> None:
        """Drop what RM has freed, or gate again what it has not."""
        with self.lock:
            if not gone:
                self.stayed(channels)
                self.wake()
                return
            rm = self.table.objects.get(key)
            if rm is None and key[0] != key[1]:
                return
            many = len(self.table.below(key)) > AT_ONCE
            if many:
                self.reconciler.freed(key)
            else:
                self.note(_gone(key))
            if rm is not None and rm.rm_class in {abi.FERMI_VASPACE_A, abi.FERMI_CONTEXT_SHARE_A}:
                self.reconciler.doubt([(key[0], key[0])])  # channels go with the address space that they use
            if channels or rm is None or rm.rm_class in GATED:
                self.reconciler.later()
        if many:
            self._wait_until_forgotten(key)

    def _wait_until_forgotten(self, key: Key) -> None:
        """Wait until much that was freed is no longer charged, so that its pod can have as much again."""
        known: Collection[object] = self.table.clients if key[0] == key[1] else self.table.objects
        until = time.monotonic() + _FORGETTING_S
        while (key[0] if key[0] == key[1] else key) in known and time.monotonic() < until:
            time.sleep(_LOOK_S)

    def empty_closed(self, pod: str) -> bool:
        """Empty files of UVM's that processes of a pod have closed; False for none. Not to be called under the lock."""
        with self.lock:
            pids = self.table.pids_of(pod)
        closed = self.uvm_files.take_closed(pids)
        for pid, files in closed.items():
            self.uvm_files.release(files)
            with self.lock:
                self.emptied(pid, files)
        return bool(closed)

    def begins_anew(self, pod: str, pid: int) -> None:
        """Forget what a process had as another program, before it has a file of UVM's that could keep anything."""
        self.empty_closed(pod)
        with self.lock:
            own = self.table.clients_of(pod)
            self._lost_of([client for client in own if self.table.clients[client].maker == pid])

    def emptied(self, pid: int, files: Iterable[UvmFile]) -> None:
        """Take note that UVM's files that a process had are empty: unless it has others, nothing of it is mapped."""
        for each in files:
            self.note({"fact": "uvm_file", "pid": pid, "fd": each.theirs, "there": False})
        if self.uvm_files.none_of(pid):
            self.quota.unmap(pid, 0, 1 << 64, None)

    def _look_for_clients(self, pod: str) -> None:
        """Ask RM which of a pod's clients are still there, but for no more than a tenth of the time."""
        began_ns = self.clock()
        if began_ns < self._look_again_ns.get(pod, 0):
            return
        self._lost_of(self.table.clients_of(pod))
        self._look_again_ns[pod] = self.clock() + 9 * (self.clock() - began_ns)

    def _lost_of(self, clients: list[int]) -> None:
        """Drop those of some clients that RM has no longer."""
        most = AT_ONCE
        for client in clients:
            if not self.gpu_ops.exists((client, client)):
                most -= self._lost((client, client), most)

    def _lost(self, key: Key, most: int = AT_ONCE) -> int:
        """Drop what RM has no longer, and return how much that was; 0 if more than ``most``, which goes bit by bit.

        Nobody else is served meanwhile, and a guardian that answers nobody for long is taken to hang.
        """
        count = len(self.table.below(key)) or 1
        if count > most:
            self.reconciler.gone(key)
            return 0
        self._vanished(key)
        return count

    def _dropped(self, key: Key) -> None:
        """Drop what was freed here."""
        self.note(_gone(key))

    def _vanished(self, key: Key) -> None:
        """Drop what RM has no longer though nobody freed it here, as when its file was closed.

        While the process that made it has a file of UVM's, that may keep the memory: a mapping can be made that was
        not told of.
        """
        entry = self.table.clients.get(key[0])
        if entry is not None and not self.uvm_files.none_of(entry.maker):
            limits = self.allowance(entry.pod).limits
            for memory in self.table.ending_with(key):
                if memory.instance in limits:
                    self.quota.map(entry.maker, _SOMEWHERE + memory.number, 1, [_NO_CARD], next(iter(memory.handles)))
        self.note(_gone(key))

    def _settle_claim(self, rm: RmObject) -> None:
        """Find out what became of a claim whose guardian died."""
        found = self.gpu_ops.real(rm)
        if (found is None and not self.gpu_ops.exists(rm.key)) or (found is not None and found[0] != rm.rm_class):
            self.note(_gone(rm.key))
            return
        if rm.rm_class == abi.NV01_MEMORY_LOCAL_USER and (size := self.gpu_ops.size(rm)) is not None:
            number = (
                self.table.allocations.by_handle[rm.key].number if rm.key in self.table.allocations.by_handle else None
            )
            self.note(_gone(rm.key))
            again = RmObject(rm.client, rm.handle, rm.parent, rm.rm_class, size)
            self.note(object_fact(again) | ({"memory": number} if number is not None else {}))
        self.note({"fact": "confirm", "client": rm.client, "handle": rm.handle, "context": 0})


def _gone(key: Key) -> Fact:
    return {"fact": "gone", "client": key[0], "handle": key[1]}
