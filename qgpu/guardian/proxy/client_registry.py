"""Pods' processes and RM clients: who owns a client, when it moves to another pod, and when it is gone."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Collection, Iterable

from qgpu.guardian.accounting.allocations import Allocation, charged_bytes
from qgpu.guardian.accounting.client_entries import MOST_USERS, RmClientEntry
from qgpu.guardian.accounting.rm_object import Key, gone_fact
from qgpu.guardian.gpu.reconciler import BATCH
from qgpu.guardian.proxy.pod_uvm_files import PodUvmFiles
from qgpu.guardian.proxy.shared_table import SharedPart, SharedTable
from qgpu.guardian.rules.classes import DEBUGGER
from qgpu.guardian.rules.rows import Handle, handles
from qgpu.linux import fd_budget, proc
from qgpu.nvidia import abi, uvm

#: The refusal of clients of another process: made by it, or to be made on a file on which it makes them.
OTHER_PROCESS = "client on another process's file"
#: Limits per pod.
_MOST_CLIENTS, _MOST_PROCESSES = 1 << 12, 1 << 12
#: How many clients of a pod may have a maker that has ended. Each reserves its maker's pid: no process of another pod
#: may use it.
_MOST_OUTLIVING = 256
#: How many objects a pod may share with all.
_MOST_SHARED = 1 << 13
#: How many objects a client may have that moves to another pod.
_MOST_MOVED = 10_000
#: How many handles of TSGs, and how many channels, a pod may have: RM takes half a millisecond to set a timeslice, and
#: up to one to gate 64 channels. A CUDA process has 4 and 20 on a card.
_MOST_TSGS, _MOST_CHANNELS = 1024, 4096
#: And how many debugger objects; a CUDA context has one. RM makes a client, a device and a subdevice with each, and
#: frees those of all of a pod's clients with one compute object (ksmdbgssnFreeCallback_IMPL).
_MOST_DEBUGGERS = 512
#: How many processes of all pods may use GPUs: a successor watches each.
_ALL_PROCESSES = 1 << 14
#: Stands for an unknown address; no process has addresses this high.
_SOMEWHERE, _NO_CARD = 1 << 63, b"\xff" * uvm.UUID_BYTES


def of_others(asked: str) -> str:
    """Return the name under which a call on another pod's client is counted."""
    return f"{asked} on another pod's client"


class ClientRegistry(SharedPart):
    """Enters processes and clients in the object table, and drops those that are gone."""

    def __init__(self, shared: SharedTable, pod_uvm_files: PodUvmFiles) -> None:
        super().__init__(shared)
        self._pod_uvm_files = pod_uvm_files
        #: By pod, when the next check of its clients may start: no other call is served during a check.
        self._look_again_ns: dict[str, int] = self._kept_by_pod()

    def register_process(self, pod: str, pid: int) -> None:
        """Enter a process in the object table. Raises OSError when it has ended, or EAGAIN.

        For a moment a pid can still be that of another pod's process that has ended. It stays that of the process that
        made a client, for as long as the client exists: RM lets UVM map the client's memory for whoever has the pid.
        """
        with self._lock:
            if self._table.processes.get(pid, pod) != pod:
                raise OSError(errno.EAGAIN, "its pid is still that of a process of another pod, which has just ended")
            if pid not in self._table.processes:
                if self._table.ended_processes.made_for_others(pid, pod):
                    raise OSError(errno.EAGAIN, "its pid is that of a process that made a client of another pod")
                own, every = len(self._table.pids_of(pod)), len(self._table.processes)
                remaining = min(fd_budget.headroom(every), _ALL_PROCESSES - every)
                if own >= _MOST_PROCESSES or not fd_budget.within_fair_share(own, remaining):
                    raise OSError(errno.EAGAIN, "too many processes of the pod use GPUs")
                pidfd = self._gpu_ops.watch(pid)
                try:
                    started = proc.start_time(pid)
                    self._shared.watch(pid, pidfd)
                except OSError:
                    self._gpu_ops.unwatch(pid)
                    raise
                self._note({"fact": "process", "pid": pid, "pod": pod, "started": started})

    def register(self, pid: int, fd: int, file: int, client: int, *, made_here: bool = False) -> bool:
        """Enter a client in the object table; False if RM does not know it on this file, or if it is another pod's.

        A client belongs to the pod that made it, even when another pod uses the file: the maker pays. Once its process
        has ended, and no other one of that pod has the file, the client belongs to the pod that uses it, if its memory
        fits there. The same holds when RM has reused the handle. ``made_here`` says that the guardian has just made it.
        Nobody but the process that made a client may use it first: RM lets UVM map a client's memory for that process
        alone, so what UVM may keep is looked for there. While the pod that has a client has the file, no other does.
        """
        pod, entry = self._table.processes.get(pid, ""), self._table.clients.get(client)
        remade = entry is not None and entry.pod == pod and not made_here and self._is_remade(entry, pid, file)
        if entry is not None and entry.pod == pod and (pid, fd) in entry.users and not made_here and not remade:
            return True
        if not self._gpu_ops.reaches(file, client):
            return False
        if remade:
            with self._lock:
                if self._table.clients.get(client) is entry and not self.forget_vanished((client, client)):
                    return False
            entry = self._table.clients.get(client)
        if entry is not None and entry.pod != pod and not self._gpu_ops.pod_has_file(client, entry.pod, file):
            reused = self._has_made(pid, file)
            if not reused and self._may_be_mapped_by_maker(entry):
                self._shared.refusals.count(pod, OTHER_PROCESS)
                return False
            if not self.may_have_another(pod):
                return False
            if not self._can_move(client, pod):
                self._shared.refusals.count(pod, "another pod's client with too many objects")
                return False
            if not self._move(client, pod, pid, fd, reused=reused, made_here=made_here):
                self._shared.refusals.count(pod, "another pod's memory over the limit")
                return False
        elif not made_here and not (entry.pod == pod if entry is not None else self._has_made(pid, file)):
            self._shared.refusals.count(pod, OTHER_PROCESS)
            return False
        elif entry is None and not self.may_have_another(pod):
            return False
        elif entry is None or made_here or len(entry.users) < MOST_USERS:
            with self._lock:
                how = {"made_here": True} if made_here else {}
                self._note({"fact": "client", "client": client, "pid": pid, "fd": fd} | how)
        return self.owns(pod, client)

    def _is_remade(self, entry: RmClientEntry, pid: int, file: int) -> bool:
        """Tell whether a pod's client is gone, and this process has made another one of its handle on a file.

        A file with a client that the guardian made is one on which the kernel makes nothing more.
        """
        if entry.made_here:
            return not self._shared.files.devices.has(file)
        return entry.maker != pid and self._has_made(pid, file)

    def _has_made(self, pid: int, file: int) -> bool:
        return self._shared.files.makers.is_by(file, pid)

    def _may_be_mapped_by_maker(self, entry: RmClientEntry) -> bool:
        """Tell whether the process that made a client, and that alone, can still map its memory, or has done so."""
        alive = self._table.processes.get(entry.maker) == entry.pod
        return alive or not self._shared.uvm_files.has_none(entry.maker)

    def has_too_many(self, pod: str, tsgs: int, channels: int, debuggers: int) -> str:
        """Return why a pod may not have so many more TSGs, channels and debuggers, or nothing."""
        table = self._table
        for kind, more, most, why in (
            (table.tsg_handles, tsgs, _MOST_TSGS, "too many TSGs"),
            (table.channel_handles, channels, _MOST_CHANNELS, "too many channels"),
            (table.others(DEBUGGER), debuggers, _MOST_DEBUGGERS, "too many debuggers"),
        ):
            if more and kind.counts[pod] + more > most:
                return why
        return ""

    def _can_move(self, client: int, pod: str) -> bool:
        """Tell whether a client has few enough objects to move to a pod at once; wait for those that are gone."""

        def is_small() -> bool:
            few = len(self._table.handles.of(client)) <= _MOST_MOVED
            kinds = self._table.tsg_handles, self._table.channel_handles, self._table.others(DEBUGGER)
            return few and not self.has_too_many(pod, *(len(kind.of(client)) for kind in kinds))

        if not is_small():
            self._shared.reconciler.recheck_clients([client], include_memory=True)
            self._shared.wait_until(is_small)
        return is_small()

    def _move(self, client: int, pod: str, pid: int, fd: int, *, reused: bool, made_here: bool) -> bool:
        """Move a client to a pod, with its memory; False if that exceeds a limit of the pod.

        If RM has reused the client's handle, it no longer has that memory. So RM is asked about it before the refusal.
        """
        if not self._has_room(pod, client):
            counted = 0

            def fits_by_now() -> bool:
                nonlocal counted
                if (count := len(self._table.handles.of(client))) == counted:
                    return False
                counted = count
                return self._has_room(pod, client)

            self.recheck(pod)
            with self._lock:
                self._shared.reconciler.recheck_clients([client], include_memory=True)
            self._shared.wait_until(fits_by_now)
        with self._lock:  # more may have come meanwhile
            if len(self._table.handles.of(client)) > _MOST_MOVED or not self._has_room(pod, client):
                return False
            self._gpu_ops.lost.discard(client)
            maker = {"maker": pid, "made_here": made_here} if reused else {}
            self._note({"fact": "owner", "client": client, "pod": pod, "pid": pid, "fd": fd} | maker)
            self._shared.reconciler.recheck_clients([client], include_memory=True)
            return True

    def _has_room(self, pod: str, client: int) -> bool:
        """Tell whether the memory that moves with a client fits a pod, and lies on the pod's own cards.

        A multicast object may keep more memory of its pod, so it does not move. This takes as long as the client has
        objects, so it needs no lock.
        """
        by_handle, moved = self._table.allocations.by_handle, list(self._table.below((client, client)))
        if self._shared.multicast_keeps and any(rm.rm_class == abi.NV_MEMORY_MULTICAST_FABRIC for rm in moved):
            return False
        behind = (by_handle.get(rm.key) for rm in moved)
        moving: Counter[int] = Counter()
        for memory in {memory.number: memory for memory in behind if memory is not None}.values():
            # As ``Allocations.transfer``: what has a handle in another client stays where it is.
            if memory.pod != pod and all(each == client for each, _ in tuple(memory.handles)):
                moving[memory.instance] += charged_bytes(memory.size)
        minors, over_limit = self._shared.allowance(pod).minors, self._shared.quota.over_limit
        return all(place in minors and not over_limit(pod, place, more) for place, more in moving.items())

    def may_have_another(self, pod: str) -> bool:
        """Tell whether a pod has fewer clients than a pod may have; count the refusal if not."""
        clients = self._table.clients_of(pod)
        entries = (self._table.clients.get(client) for client in clients)
        outliving = sum(entry is not None and entry.maker not in self._table.processes for entry in entries)
        few = len(clients) < _MOST_CLIENTS and outliving < _MOST_OUTLIVING
        if few and self._shared.quota.may_record(pod):
            return True
        self._shared.refusals.count(pod, "too many clients of RM")
        return False

    def record_file_found(self, client: int, pid: int, fd: int) -> bool:
        """Record a descriptor that leads to a client; False if its process cannot be watched."""
        with self._lock:
            if (entry := self._table.clients.get(client)) is None:
                return False
            try:
                self.register_process(entry.pod, pid)
            except OSError:
                return False
            self._note({"fact": "reached", "client": client, "pid": pid, "fd": fd})
            return True

    def owns(self, pod: str, client: int) -> bool:
        """Tell whether a client belongs to a pod."""
        entry = self._table.clients.get(client)
        return entry is not None and entry.pod == pod

    def names_others(self, pod: str, own: int, places: Iterable[Handle], params: bytes | bytearray) -> bool:
        """Tell whether parameters name a client that is neither the call's own nor the pod's; 0 names none.

        RM checks a call's own client against the file of the call. It does not check a client that the parameters name,
        or hands it to firmware, which accepts any client.
        """
        return any(client not in (0, own) and not self.owns(pod, client) for client in handles(places, params))

    def share_with_all(self, client: int, handle: int, *, there: bool) -> bool:
        """Record that a pod shares an object with all, or no longer; ALL_OBJECTS of a client. False for too many."""
        with self._lock:
            entry = self._table.clients.get(client)
            if entry is None or (there and self._table.shared_with_all.counts[entry.pod] >= _MOST_SHARED):
                return False
            self._note({"fact": "shared", "client": client, "handle": handle, "there": there})
            return True

    def record_unrestorable(self, client: int, what: str) -> None:
        """Record that a client gets something that a checkpoint cannot restore; before RM gives it."""
        with self._lock:
            if client in self._table.clients and client not in self._table.unrestorable[what]:
                self._note({"fact": "unrestorable", "client": client, "what": what})

    def recheck_pods(self, pods: Collection[str]) -> None:
        """Ask RM what pods freed without a guardian: after unanswered calls, which know best what they freed."""
        with self._lock:
            clients = [client for pod in pods for client in self._table.clients_of(pod)]
            self._shared.reconciler.recheck_clients(clients, include_memory=True)

    def recheck(self, pod: str) -> bool:
        """Drop clients that RM no longer has, without the lock and for a tenth of the time at most; True for any."""
        with self._lock:
            began_ns, clients = self._shared.clock(), self._table.clients_of(pod)
            if began_ns < self._look_again_ns.get(pod, 0):
                return False
        dropped = self._forget_vanished_clients(clients)
        with self._lock:
            self._look_again_ns[pod] = self._shared.clock() + 9 * (self._shared.clock() - began_ns)
        return dropped

    def forget_previous_program(self, pod: str, pid: int) -> None:
        """Forget what a process held before exec, before it gets a UVM file that could keep memory."""
        self._pod_uvm_files.release_closed(pod)
        with self._lock:
            own = [client for client in self._table.clients_of(pod) if self._table.clients[client].maker == pid]
        self._forget_vanished_clients(own)

    def _forget_vanished_clients(self, clients: Iterable[int]) -> bool:
        """Drop the clients among these that RM no longer has; True if there were any. Call it without the lock."""
        most = BATCH
        for client in clients:
            if self._gpu_ops.has_client(client):
                continue
            with self._lock:  # RM may have given the handle to another client by now
                if client in self._table.clients and not self._gpu_ops.has_client(client):
                    most -= self.forget_vanished((client, client), most)
        return most < BATCH

    def forget_vanished(self, key: Key, most: int = BATCH) -> int:
        """Drop what RM no longer has, and return how much; 0 if it is more than ``most`` and goes step by step.

        No other call is served meanwhile, and the daemon takes a guardian that answers nobody for hung.
        """
        count = self._table.count_below(key, most) or 1
        if count > most:
            self._shared.reconciler.forget_in_steps(key)
            return 0
        self.forget_at_once(key)
        return count

    def forget_at_once(self, key: Key) -> None:
        """Drop an object that RM no longer has although no call freed it, for example because its file was closed.

        If its maker has a UVM file, that file may keep the memory, and TSGs: the maker may have a mapping that was
        never reported, and registered channels. They then stay charged as mapped.
        """
        entry = self._table.clients.get(key[0])
        if entry is not None and not self._shared.uvm_files.has_none(entry.maker):
            self.charge_on(entry, [*self._table.ending_with(key), *self._table.contexts_with(key)])
        self._note(gone_fact(key))

    def charge_on(self, entry: RmClientEntry, memories: Iterable[Allocation]) -> None:
        """Charge what is about to lose its handles as if the client's maker had mapped it at an unknown address."""
        limits = self._shared.allowance(entry.pod).limits
        for memory in memories:
            if memory.instance in limits:
                handle = next(iter(memory.handles))
                self._shared.quota.map(entry.maker, _SOMEWHERE + memory.number, 1, [_NO_CARD], handle)
