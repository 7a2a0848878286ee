"""What pods are charged of their cards' memory: by handles, by what else keeps it, and by address space."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from qgpu.guardian.accounting import managed_memory, object_table
from qgpu.guardian.accounting.allocations import NOBODYS
from qgpu.guardian.accounting.object_table import Fact, Key, ObjectTable, RmObject, object_fact
from qgpu.linux import fd_budget, kcmp
from qgpu.linux.open_file_set import FileSet

#: How many mappings of a process are kept.
_MOST_MAPPINGS = 1 << 18
#: How many exports of a pod may be open: all that are open are listed once a second.
_MOST_CARRIED = 1 << 14


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a pod was granted, in RM's terms: minors of its cards and memory limits by device instance."""

    minors: Mapping[int, int] = field(default_factory=dict)
    limits: Mapping[int, int] = field(default_factory=dict)
    #: A pod that is not known has no card and is held to limits, on every one to nothing.
    known: bool = True

    @property
    def limited(self) -> bool:
        """Tell whether there is a memory limit on any card."""
        return bool(self.limits) or not self.known


NO_POD = Allowance(known=False)


class MemoryQuota:
    """All pods' charges, and whether more would fit."""

    def __init__(
        self,
        table: ObjectTable,
        lock: threading.RLock,
        note: Callable[[Fact], None],
        allowance: Callable[[str], Allowance],
        look_for_clients: Callable[[str], None],
        uuids: Callable[[], Mapping[bytes, int]],
        uvm_files: Callable[[int], int],
        carriers: FileSet,
    ) -> None:
        self._table = table
        self._lock = lock
        self._note = note
        self._allowance = allowance
        #: Finds out which of a pod's clients are still there.
        self._look_for_clients = look_for_clients
        self._uuids = uuids
        #: Tells how many files of UVM's are held of a process: each keeps an address space, whatever RM has of it.
        self._uvm_files = uvm_files
        #: Files that carry exported memory.
        self._carriers = carriers
        #: Mappings that pods are about to make, in bytes by process: charged until /proc shows what became of them.
        self._mapping: Counter[int] = Counter()

    def exited(self, pid: int) -> None:
        """Forget what a process was about to map."""
        self._mapping.pop(pid, None)

    def used(self, pod: str, instance: int) -> int:
        """Return what a pod is charged on a card, in bytes, managed memory included where the pod has a limit."""
        held = self._table.allocations.held.get((pod, instance), 0)
        if instance in self._allowance(pod).limits:
            held += self._table.managed(pod) + self._being_mapped(pod) + self._tables(pod, instance)
        return held

    def _tables(self, pod: str, instance: int) -> int:
        """Return what page tables of UVM's may take of a card for a pod: it makes them, and tells nobody."""
        allocations = self._table.allocations
        uuids = [uuid for uuid, of in self._uuids().items() if of == instance]
        pids = self._table.pids_of(pod)
        files = sum(map(self._uvm_files, pids))
        return sum(allocations.tables(pid, uuid) for pid in pids for uuid in uuids) + files * object_table.SPACE_BYTES

    def fits_mapping(self, pod: str, pid: int, base: int, length: int, uuids: Iterable[bytes]) -> bool:
        """Tell whether there is room for the page tables of a mapping, and for one more mapping at all."""
        with self._lock:
            if self._table.allocations.mappings_of(pid) >= _MOST_MAPPINGS:
                return False
            more = {uuid: self._table.allocations.more_tables(pid, uuid, base, length) for uuid in uuids}
            return not any(self.over_limit(pod, self._uuids()[uuid], size) for uuid, size in more.items())

    def _being_mapped(self, pod: str) -> int:
        return sum(self._mapping[pid] for pid in self._table.pids_of(pod)) if self._mapping else 0

    def over_limit(self, pod: str, instance: int, more: int = 0) -> bool:
        """Tell whether a pod is over its limit on a card, after asking RM which of its clients are still there."""
        if not self._allowance(pod).known:
            return True
        limit = self._allowance(pod).limits.get(instance)
        if limit is None or self.used(pod, instance) + more <= limit:
            return False
        self._look_for_clients(pod)
        return self.used(pod, instance) + more > limit

    def reserve_mapping(self, pod: str, pid: int, size: int) -> bool:
        """Charge a mapping that a process is about to make; False when it does not fit somewhere."""
        with self._lock:
            allowance = self._allowance(pod)
            if not allowance.known or any(self.over_limit(pod, instance, size) for instance in allowance.limits):
                return False
            self._mapping[pid] += size
            return True

    def mappings_of(self, pod: str, *, all_known: bool = False) -> list[int]:
        """List the processes of a pod that have mapped what could be managed memory, or all that may have."""
        with self._lock:
            managed = self._table.allocations.managed
            return [pid for pid in self._table.pids_of(pod) if managed.get(pid) or (all_known and pid in managed)]

    def look_at_mappings(self, pid: int, settled: int = 0) -> bool:
        """Charge a process what it maps of UVM now, ``settled`` bytes of what was being mapped among it.

        True when that is less than before. Not to be called under the lock: a process can make this take long.
        """
        held = fd_budget.patiently(lambda: managed_memory.mapped(pid))
        with self._lock:
            before = self._table.allocations.managed.get(pid, 0)
            self._mapping[pid] -= settled
            if held != before:
                self._note({"fact": "managed", "pid": pid, "bytes": held})
            return held < before or settled > 0

    def uses_uvm(self, pid: int) -> bool:
        """Tell whether a process has initialised UVM, or shares its memory with one of its pod's that has."""
        with self._lock:
            pod = self._table.processes.get(pid, "")
            known = [other for other in self._table.pids_of(pod) if other in self._table.allocations.managed]
        return pid in known or any(kcmp.same_memory(pid, other) for other in known)

    def will_use_uvm(self, pid: int) -> None:
        """Note that a process initialises UVM."""
        with self._lock:
            if pid not in self._table.allocations.managed:
                self._note({"fact": "managed", "pid": pid, "bytes": 0})

    def joins_uvm(self, pod: str, pid: int) -> bool:
        """Note that a process uses UVM, and what it maps of it; False when the pod is over a limit with that.

        Another process may have initialised UVM for this one, whose memory it shares, and be gone.
        """
        self.will_use_uvm(pid)
        self.look_at_mappings(pid)
        with self._lock:
            return not any(self.over_limit(pod, instance) for instance in self._allowance(pod).limits)

    def map(self, pid: int, base: int, length: int, uuids: Iterable[bytes], memory: Key) -> None:
        """Let what UVM has mapped keep its memory; what is not on a card is nobody's here, and takes page tables."""
        with self._lock:
            owner = self._table.clients.get(memory[0])
            own = owner is not None and owner.pod == self._table.processes.get(pid)
            held = self._table.allocations.by_handle.get(memory) if own else None
            number = held.number if held is not None else NOBODYS
            fact = {"fact": "map", "pid": pid, "base": base, "length": length, "memory": number}
            for uuid in uuids:
                self._note(fact | {"uuid": uuid.hex()})

    def unmap(self, pid: int, base: int, length: int, uuid: bytes | None) -> None:
        """Take note that UVM has unmapped a range for one card, or for all."""
        with self._lock:
            if pid in self._table.allocations.mappings:
                name = uuid.hex() if uuid is not None else None
                self._note({"fact": "unmap", "pid": pid, "base": base, "length": length, "uuid": name})

    def unmap_memory(self, number: int) -> None:
        """Take note that memory is gone, whatever was said to be mapped of it."""
        with self._lock:
            if self._table.allocations.is_mapped(number):
                self._note({"fact": "unmapped", "memory": number})

    def duplicating(self, rm: RmObject, handle: int, number: int) -> None:
        """Book a second handle that we are about to make on a pod's memory."""
        with self._lock:
            ours = RmObject(rm.client, handle, rm.parent, rm.rm_class, rm.detail)
            self._note(object_fact(ours) | {"memory": number})

    def export(self, pod: str, client: int, handles: Iterable[int], carrier: int) -> int | None:
        """Let memory count for as long as an open file carries it, wherever; return the mark of that file.

        None where there is no such memory. Raises OSError where it could not be seen when the file closes.
        """
        with self._lock:
            keys = ((client, handle) for handle in handles)
            numbers = [number for key in keys if (number := self.number_of(key)) is not None]
            if not numbers:
                return None
            if self._table.allocations.carries(pod) + len(numbers) > _MOST_CARRIED:
                raise OSError(errno.ENOSPC, "the pod exports as much as can be watched")
            mark = self._table.allocations.next_carrier()
        if not self._carriers.add(carrier, mark):
            raise OSError(errno.ENOSPC, "the file carries as many exports as can be told apart")
        with self._lock:
            for number in numbers:
                self._note({"fact": "carry", "carrier": mark, "memory": number} | self._whose(number))
        return mark

    def not_exported(self, mark: int) -> None:
        """Take back what was noted of an export that RM has refused.

        The file keeps its mark: another pod's may have come behind it, and which is which the kernel does not tell.
        """
        self.carriers_closed([mark])

    def carriers_closed(self, marks: Iterable[int]) -> None:
        """Take note that nobody has some carriers open any more."""
        for mark in marks:
            with self._lock:
                self._note({"fact": "carrier_closed", "carrier": mark})

    def closed_carriers(self) -> set[int]:
        """Find the marks of carriers that nobody has open any more. Takes long where there are many: not for a lock."""
        with self._lock:
            known = self._table.allocations.carriers()
        return known - self._carriers.marks() if known else known

    def pin_handles(self, client: int, handles: Iterable[int]) -> None:
        """Pin the memory behind handles of a client, if there is any."""
        with self._lock:
            for handle in handles:
                if (number := self.number_of((client, handle))) is not None:
                    self.pin(number)

    def pin(self, number: int) -> None:
        """Let memory count until every process of its pod has ended, whatever becomes of its handles."""
        with self._lock:
            self._note({"fact": "pin", "memory": number} | self._whose(number))

    def _whose(self, number: int) -> Fact:
        """Say of memory what a journal must know of it that is compacted meanwhile."""
        memory = self._table.allocations.memories.get(number)
        return {"pod": memory.pod, "instance": memory.instance, "size": memory.size} if memory is not None else {}

    def number_of(self, key: Key) -> int | None:
        """Return the number of the memory behind a handle."""
        memory = self._table.allocations.by_handle.get(key)
        return memory.number if memory is not None else None
