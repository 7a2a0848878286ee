"""Frees a pod's memory and unmaps it, and finds out from RM's own figures what of it is really gone.

A handle is not all that keeps memory: UVM's mappings do, and what they are is only claimed (``uvmjudge.py``). RM
counts for each process how much of its memory nobody else refers to (GPU_GET_PID_INFO: memPrivate). Freed memory
that was private makes that figure fall by its size; else something keeps it, and so does its charge. Memory
that is freed while it is mapped first gets another handle of ours in the pod's client, which is freed in the same
way when the last mapping goes. What does not show in the figures stays charged until the pod's last process has ended.

The figures are read while nothing else can move them: the pod's calls are served one at a time, none of its mappings
is being made, no other pod is making a handle on its memory (``Supervisor.books``), and none of its files was closed.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from qgpu.guardian.accounting.allocations import Allocation
from qgpu.guardian.accounting.object_table import Key
from qgpu.guardian.proxy.handler_context import PodCall
from qgpu.guardian.proxy.supervisor import Supervisor

_log = structlog.get_logger("guardian")

#: Handles of ours in pods' clients, far from those libcuda picks.
_FIRST_HANDLE = 0x6FFF0000
#: So many objects of a pod are gone through without asking.
_FEW = 1000


class FreeHandler:
    """Frees and unmaps for one pod."""

    def __init__(self, supervisor: Supervisor, pod: str, quiet: Callable[[], bool]) -> None:
        self._supervisor = supervisor
        self._pod = pod
        #: Waits until none of the pod's mappings is being made; False when one does not end.
        self._quiet = quiet
        self._next = _FIRST_HANDLE

    def free(self, case: PodCall, key: Key, carry_out: Callable[[], bool]) -> bool:
        """Have an object freed, and keep the charge of memory that is not gone with it; return if RM freed it."""
        entry = self._supervisor.table.clients.get(key[0])
        # What RM will not free through this file is not gone through where it may be much.
        few = entry is not None and self._supervisor.table.counts[entry.pod] <= _FEW
        mine = few or self._supervisor.gpu_ops.about(case.file, key[0], key[0]) is not None
        with self._supervisor.lock:
            ending = self._supervisor.table.ending_with(key) if mine else []
            memories = [memory for memory in ending if not memory.pinned and self._limited(memory)]
        if not memories or entry is None:
            case.begin()
            return carry_out()
        quiet = self._quiet()
        with self._supervisor.books(entry.pod):
            if key in memories[0].handles and self._another(case.file, key, memories[0]):
                case.begin()
                return carry_out()
            clients = self._clients(key)
            before = self._before(case, key, entry.maker, memories[0])
            if not carry_out():
                return False
            after = self._private(entry.maker, memories[0])
            if before is None or after is None:
                return True  # a driver that does not say: claims must do
            size = sum(memory.size for memory in memories)
            if quiet and before - after >= size and self._clients(key) == clients:
                for memory in memories:
                    self._supervisor.quota.unmap_memory(memory.number)
            else:
                _log.info("memory outlives its handle", pod=self._pod, bytes=size)
                for memory in memories:
                    self._supervisor.quota.pin(memory.number)
            return True

    def unmap(self, case: PodCall, base: int, length: int, card: bytes | None, carry_out: Callable[[], bool]) -> None:
        """Have a range unmapped, and give up memory that nothing but our own handle keeps then."""
        pid, allocations = case.pid, self._supervisor.table.allocations
        case.begin()
        with self._supervisor.lock:
            mapped = allocations.mapped_in(pid, base, length, card)
            if case.again:  # what a dead guardian had taken note of no longer counts as mapped there
                mapped = [memory for memory in allocations.memories.values() if memory.pod == self._pod]
            kept = [memory for memory in mapped if self._ours(memory)]
        if not kept or not self._limited(kept[0]):
            if carry_out():
                self._supervisor.quota.unmap(pid, base, length, card)
            return
        quiet = self._quiet()
        with self._supervisor.books(self._pod):
            if not carry_out():
                return
            self._supervisor.quota.unmap(pid, base, length, card)
            with self._supervisor.lock:
                gone = [memory for memory in kept if not allocations.is_mapped(memory.number)]
            for memory in gone:
                for key in list(memory.handles):
                    self._give_up(case, key, memory, quiet=quiet)

    def _give_up(self, case: PodCall, key: Key, memory: Allocation, *, quiet: bool) -> None:
        """Free a handle of ours; memory that something else keeps after all stays charged."""
        entry = self._supervisor.table.clients.get(key[0])
        maker = entry.maker if entry is not None else 0
        clients = self._clients(key)
        before = self._before(case, key, maker, memory)
        freed = self._supervisor.gpu_ops.free_anywhere(key) or (case.again and not self._there(key))
        after = self._private(maker, memory)
        shows = quiet and self._clients(key) == clients
        if before is not None and after is not None and (not shows or before - after < memory.size):
            self._supervisor.quota.pin(memory.number)
        if freed:
            self._supervisor.freed(key, [], gone=True)

    def is_ours(self, key: Key) -> bool:
        """Tell whether a handle is one of those that we made: a pod may not free it."""
        return key[1] >= _FIRST_HANDLE and key[1] < _FIRST_HANDLE + 0x10000

    def _clients(self, freed: Key) -> list[int]:
        """List the pod's clients that RM knows: a file that is closed meanwhile takes its client's memory along."""
        with self._supervisor.lock:
            clients = self._supervisor.table.clients_of(self._pod)
        return [
            client
            for client in clients
            if (client, client) != freed and self._supervisor.gpu_ops.exists((client, client))
        ]

    def _ours(self, memory: Allocation) -> bool:
        return bool(memory.handles) and all(self.is_ours(key) for key in memory.handles)

    def _limited(self, memory: Allocation) -> bool:
        return memory.instance in self._supervisor.allowance(memory.pod).limits

    def _private(self, pid: int, memory: Allocation) -> int | None:
        return self._supervisor.gpu_ops.private_bytes(memory.instance, pid)

    def _there(self, key: Key) -> bool:
        return self._supervisor.gpu_ops.exists(key)

    def _before(self, case: PodCall, key: Key, maker: int, memory: Allocation) -> int | None:
        """Return RM's figure before memory is freed; where a dead guardian has freed it already, what that one read."""
        gone = case.left if case.again and not self._there(key) else None
        before = gone.before if gone is not None else self._private(maker, memory)
        case.begin(before)
        return before

    def _another(self, file: int, key: Key, memory: Allocation) -> bool:
        """Make a handle of ours on memory that is still mapped; True when it is there."""
        rm = self._supervisor.table.objects.get(key)
        with self._supervisor.lock:
            mapped = self._supervisor.table.allocations.is_mapped(memory.number)
        if rm is None or not mapped:
            return False
        while (ours := (key[0], self._next)) in self._supervisor.table.objects:  # a dead guardian's, maybe
            self._next = _FIRST_HANDLE + (self._next + 1 - _FIRST_HANDLE) % 0x10000
        self._supervisor.quota.duplicating(rm, ours[1], memory.number)
        if not self._supervisor.gpu_ops.duplicate(file, rm, ours[1]):
            self._supervisor.not_made(ours)
            return False
        self._supervisor.made(ours)
        return True
