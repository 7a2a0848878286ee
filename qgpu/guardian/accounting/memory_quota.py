"""What pods are charged for their cards' memory: by handles, by whatever else keeps it, and by address space."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from qgpu.guardian.accounting import managed_memory, object_table
from qgpu.guardian.accounting.allocations import NO_ALLOCATION
from qgpu.guardian.accounting.managed_search import ManagedSearch
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.rm_object import NO_INSTANCE, Fact, Key, RmObject, object_fact
from qgpu.guardian.accounting.sets_by_key import Counts
from qgpu.linux import fd_budget
from qgpu.linux.open_file_set import FileSet
from qgpu.nvidia import mig

#: How many clients, objects, allocations and mappings of all pods are tracked: a successor reads each. A pod may have a
#: third of them: enough for a whole H200, mapped in pieces of 2 MiB. Each pod is guaranteed more than the 430 that any
#: recorded program makes.
_MOST_RECORDS, _GUARANTEED_RECORDS = 3 << 18, 1 << 10
#: How many recorded mappings may lie where one more is made: those on other cards, and those that UVM refused.
_MOST_OVERLAPS = 256
#: The longest range that a process may map: its address space is no larger.
_MOST_BYTES = 1 << 47
#: How many exports of a pod, and of all pods, may be open: all open ones are listed once a second.
_MOST_CARRIED, _ALL_CARRIED = 1 << 14, 1 << 16


@dataclass(frozen=True, slots=True)
class Allowance:
    """A pod's grants in RM's terms: minors of its cards, memory limits by device instance, and what else they allow.

    A MIG instance is keyed by a number of its own (``qgpu.nvidia.mig``) instead of its card's device instance.
    """

    minors: Mapping[int, int] = field(default_factory=dict)
    limits: Mapping[int, int] = field(default_factory=dict)
    #: Whether every grant allows profiling, and graphics.
    profiling: bool = False
    graphics: bool = False
    #: An unknown pod has no card, and its limit on every card is nothing.
    known: bool = True

    @property
    def limited(self) -> bool:
        """Tell whether there is a memory limit on any card."""
        return bool(self.limits) or not self.known

    @property
    def on_instance(self) -> bool:
        """Tell whether the pod has a MIG instance."""
        return any(mig.numbers_at(place) for place in self.minors)

    def place_on(self, instance: int) -> int | None:
        """Return where the pod works on the card that RM calls ``instance``: there, or in its MIG instance of it."""
        if instance in self.minors:
            return instance
        return next((place for place in self.minors if mig.card_of(place) == instance), None)


NO_POD = Allowance(known=False)


@dataclass(eq=False)
class MemoryQuota:
    """All pods' charges, and whether more memory fits."""

    _table: ObjectTable
    _lock: threading.RLock
    _note: Callable[[Fact], None]
    _allowance: Callable[[str], Allowance]
    #: Drops a pod's clients that RM no longer has; True if there were any. It needs the lock not to be held.
    _recheck_clients: Callable[[str], bool]
    _uuids: Callable[[], Mapping[bytes, int]]
    #: Returns how many UVM files of a pod are held: each keeps an address space, whatever RM has of it.
    _uvm_files: Callable[[str], int]
    #: Files that carry exported memory.
    _carriers: FileSet
    #: Mappings in progress, in bytes by process and by pod: charged until /proc shows the result.
    _mapping: Counts[int] = field(default_factory=Counts)
    _mapping_of: Counts[str] = field(default_factory=Counts)
    search: ManagedSearch = field(init=False)

    def __post_init__(self) -> None:
        self.search = ManagedSearch(self._table, self._lock, self._mapped, self._charge_mapped, self._note_left)

    def exited(self, pid: int) -> None:
        """Settle the mappings in progress of a process that has ended, as if it had made them: it may share its memory.

        Its exit leaves them to the pod. Call it with the lock, before the exit is noted.
        """
        if size := self._mapping[pid]:
            self._note_managed(pid, self._table.allocations.managed.get(pid, 0) + size)
            self._count_in_progress(pid, -size)

    def _count_in_progress(self, pid: int, more: int) -> None:
        """Count bytes of mappings in progress, if the process lives; what is settled was charged before."""
        if (pod := self._table.processes.get(pid)) is not None:
            more = max(more, -self._mapping[pid])
            self._mapping.change(pid, more)
            self._mapping_of.change(pod, more)

    def used(self, pod: str, instance: int) -> int:
        """Return what a pod is charged on a card, in bytes; managed memory counts only under a limit.

        It takes no longer with more processes: a pod can have thousands.
        """
        allocations = self._table.allocations
        held = allocations.held.get((pod, instance), 0)
        if instance in self._allowance(pod).limits:
            held += allocations.managed_of[pod] + allocations.managed_left[pod] + self._mapping_of[pod]
            # UVM allocates page tables without a call, and RM the address space of a device of whichever card.
            spaces = self._uvm_files(pod) + self._table.unplaced_devices.counts[pod]
            held += spaces * object_table.SPACE_BYTES
            held += sum(allocations.tables_of[pod, uuid] for uuid, of in self._uuids().items() if of == instance)
        return held

    def may_record(self, pod: str) -> bool:
        """Tell whether one more object or mapping of a pod may be tracked: no pod may take the shares of others."""
        own, every = self._table.records(pod)
        return fd_budget.within_fair_share(own, _MOST_RECORDS - every, _GUARANTEED_RECORDS)

    def may_map(self, pod: str, pid: int, base: int, length: int) -> bool:
        """Tell whether one more mapping of a process may be tracked; UVM makes none over another on a card."""
        if length > _MOST_BYTES:
            return False
        with self._lock:
            overlaps = self._table.allocations.space_of(pid).count_overlaps(base, base + length, _MOST_OVERLAPS)
            return overlaps < _MOST_OVERLAPS and self.may_record(pod)

    def fits_mapping(self, pod: str, pid: int, base: int, length: int, uuids: Iterable[bytes]) -> bool:
        """Tell whether there is room for the page tables of one more mapping."""
        with self._lock:
            space = self._table.allocations.space_of(pid)
            more = {uuid: space.more_tables(uuid, base, length) for uuid in uuids}
        return all(self.fits(pod, [self._uuids()[uuid]], size) for uuid, size in more.items())

    def over_limit(self, pod: str, instance: int, more: int = 0) -> bool:
        """Tell whether a pod is over its limit on a card; if the card is unknown (NO_INSTANCE), on any."""
        allowance = self._allowance(pod)
        places = allowance.limits if instance == NO_INSTANCE else allowance.limits.keys() & {instance}
        over = any(self.used(pod, place) + more > allowance.limits[place] for place in places)
        return over or not allowance.known

    def fits(
        self, pod: str, instances: Collection[int], more: int = 0, then: Callable[[], object] = lambda: None
    ) -> bool:
        """Tell whether a pod is within its limits on cards.

        If it is not, its processes are searched for managed memory that one of them has left, and RM is asked which of
        its clients exist. If it is, ``then`` is done under the same lock. Call it without any lock.
        """

        def fits() -> bool:
            with self._lock:
                if any(self.over_limit(pod, instance, more) for instance in instances):
                    return False
                then()
                return True

        if fits():
            return True
        self.search.clear(pod)  # another thread may have ended such a search since
        return fits() or (self._recheck_clients(pod) and fits())

    def reserve_mapping(self, pod: str, pid: int, size: int) -> bool:
        """Charge a mapping that a process is about to make; False if it exceeds a limit on any card."""
        allowance = self._allowance(pod)
        return allowance.known and self.fits(pod, allowance.limits, size, lambda: self._count_in_progress(pid, size))

    def mappings_of(self, pod: str) -> list[int]:
        """List a pod's processes that have mapped possible managed memory."""
        managed = self._table.allocations.managed
        return [pid for pid in self._table.pids_of(pod) if managed.get(pid)]

    def rescan_mappings(self, pid: int, settled: int = 0) -> None:
        """Charge a process for what it maps of UVM now; ``settled`` bytes of mappings in progress are included in it.

        What is less than before stays charged to the pod until a search (``search``).
        Call it without the lock: a process can make this take long.
        """
        if (held := self._mapped(pid)) is not None:  # else its charge stays as it is
            with self._lock:
                self._charge_mapped(pid, held, settled)

    def _charge_mapped(self, pid: int, held: int, settled: int = 0) -> None:
        """Charge a process for what it maps; what is less than before is left to its pod."""
        if (pod := self._table.processes.get(pid)) is None:
            return
        settled = min(settled, self._mapping[pid])
        allocations = self._table.allocations
        less = allocations.managed.get(pid, 0) + settled - held
        if less > 0:
            self._note_left(pod, allocations.managed_left[pod] + less)
        self._note_managed(pid, held)
        self._count_in_progress(pid, -settled)

    def _note_left(self, pod: str, size: int) -> None:
        if size != self._table.allocations.managed_left[pod]:
            self._note({"fact": "managed_left", "pod": pod, "bytes": size})

    def _mapped(self, pid: int) -> int | None:
        return fd_budget.retry_on_emfile(lambda: managed_memory.mapped(pid))

    def _note_managed(self, pid: int, size: int) -> None:
        if size != self._table.allocations.managed.get(pid, 0):
            self._note({"fact": "managed", "pid": pid, "bytes": size})

    def uses_uvm(self, pod: str) -> bool:
        """Tell whether a process of a pod uses UVM: then all that any of them maps may become managed memory.

        UVM asks whose memory map has initialised its file (uvm.c:uvm_mmap). Any process can share that map, and be the
        last to have it: the one that initialised the file may have ended, or executed another program.
        """
        return self._table.allocations.managers[pod] > 0 or self._uvm_files(pod) > 0

    def will_use_uvm(self, pid: int) -> None:
        """Record that a process may have managed memory from now on."""
        with self._lock:
            if pid not in self._table.allocations.managed:
                self._note({"fact": "managed", "pid": pid, "bytes": 0})

    def start_using_uvm(self, pod: str, pid: int) -> bool:
        """Record that a process uses UVM, and what it maps of it; False if the pod is then over a limit."""
        self.will_use_uvm(pid)
        self.rescan_mappings(pid)
        return self.fits(pod, self._allowance(pod).limits)

    def map(self, pid: int, base: int, length: int, uuids: Iterable[bytes], memory: Key) -> None:
        """Record a UVM mapping, which keeps its memory; a mapping of other memory is charged for page tables only."""
        with self._lock:
            owner = self._table.clients.get(memory[0])
            own = owner is not None and owner.pod == self._table.processes.get(pid)
            number = self.number_of(memory) if own else None
            fact = {"fact": "map", "pid": pid, "base": base, "length": length, "memory": number or NO_ALLOCATION}
            for uuid in uuids:
                self._note(fact | {"uuid": uuid.hex()})

    def unmap(self, pid: int, base: int, length: int, uuid: bytes | None) -> None:
        """Record that UVM has unmapped a range, for one card or for all."""
        with self._lock:
            if pid in self._table.allocations.mappings:
                name = uuid.hex() if uuid is not None else None
                # A pod without a share for more pays for mappings that are left in part as for whole ones.
                whole = {} if self.may_record(self._table.processes.get(pid, "")) else {"whole": True}
                self._note({"fact": "unmap", "pid": pid, "base": base, "length": length, "uuid": name} | whole)

    def unmap_memory(self, number: int) -> None:
        """Record that memory is gone, whatever mappings of it are recorded."""
        with self._lock:
            if self._table.allocations.is_mapped(number):
                self._note({"fact": "unmapped", "memory": number})

    def claim_duplicate(self, rm: RmObject, handle: int, number: int) -> None:
        """Claim a second handle that we are about to make on a pod's memory."""
        with self._lock:
            ours = RmObject(rm.client, handle, rm.parent, rm.rm_class, rm.detail)
            self._note(object_fact(ours) | {"memory": number})

    def export(self, client: int, handles: Iterable[int], carrier: int) -> None:
        """Charge memory while a file that carries it is open anywhere; nothing if there is no such memory.

        It counts to the exports of the memory's owner, also if RM then refuses the export: the file keeps its mark.
        Raises OSError if we would not see the file close.
        """
        with self._lock:
            keys = [(client, handle) for handle in handles]
            numbers = [number for key in keys if (number := self.number_of(key)) is not None]
            if not numbers:
                return
            for owner, more in Counter(self._table.allocations.memories[each].pod for each in numbers).items():
                own, every = self._table.allocations.carries(owner)
                if own + more > _MOST_CARRIED or not fd_budget.within_fair_share(own + more - 1, _ALL_CARRIED - every):
                    raise OSError(errno.ENOSPC, "too many open exports of the pod")
            mark = self._table.allocations.next_carrier()
        if not self._carriers.add(carrier, mark):
            raise OSError(errno.ENOSPC, "too many exports through one file")
        with self._lock:
            for number in numbers:
                self._note({"fact": "carrier", "carrier": mark, "memory": number} | self._whose(number))
            for key in keys:
                if self._table.is_on_fabric(key) and (number := self.number_of(key)) is not None:
                    self.pin(number)  # nobody can tell of which memory an import from the fabric is

    def carriers_closed(self, marks: Iterable[int]) -> None:
        """Record that carriers are closed everywhere."""
        for mark in marks:
            self._note({"fact": "carrier_closed", "carrier": mark})

    def closed_carriers(self) -> set[int]:
        """Return the marks of carriers that are closed everywhere. Takes long with many: call it without the lock."""
        with self._lock:
            known = self._table.allocations.carriers()
        return known - self._carriers.marks() if known else known

    def pin_handles(self, client: int, handles: Iterable[int]) -> None:
        """Pin the memory behind a client's handles, if there is any."""
        with self._lock:
            for handle in handles:
                if (number := self.number_of((client, handle))) is not None:
                    self.pin(number)

    def pin(self, number: int) -> None:
        """Charge memory until every process of its pod has ended, whatever happens to its handles."""
        with self._lock:
            self._note({"fact": "pin", "memory": number} | self._whose(number))

    def _whose(self, number: int) -> Fact:
        """Return the owner of memory, for a fact that must make sense in a compacted journal."""
        memory = self._table.allocations.memories.get(number)
        return memory.whose if memory is not None else {}

    def number_of(self, key: Key) -> int | None:
        """Return the number of the allocation behind a handle."""
        memory = self._table.allocations.by_handle.get(key)
        return memory.number if memory is not None else None
