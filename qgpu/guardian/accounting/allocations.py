"""The memory that pods hold: allocations on a card, what keeps each, and address space for managed memory.

An allocation is charged to the pod that made it while anything keeps it: a handle, a duplicate, a mapping in UVM, or an
open file that carries it. The file may be in another pod or in a message in flight. An allocation that something unseen
may keep is pinned. Other files decide what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from qgpu.guardian.accounting.address_space import AddressSpace, Mapping
from qgpu.guardian.accounting.rm_object import Key
from qgpu.guardian.accounting.sets_by_key import Counts, SetsByKey, while_there


@dataclass(slots=True)
class Allocation:
    """One allocation on a card, numbered by us; ``size`` is RM's figure."""

    number: int
    pod: str
    instance: int
    size: int
    handles: set[Key] = field(default_factory=set)
    #: Open files that carry it, by their marks in ``FileSets.carriers``.
    carriers: set[int] = field(default_factory=set)
    #: Something unseen may keep it: it counts until the pod has no process and no client, and no file carries memory of
    #: the pod.
    pinned: bool = False
    #: Another pod or program exported it. Of one in no pod ``instance`` may be another card than it lies on.
    foreign: bool = False

    @property
    def is_kept(self) -> bool:
        """Tell whether it counts also without handles and mappings."""
        return self.pinned or bool(self.carriers)

    @property
    def whose(self) -> dict[str, Any]:
        """What a fact says about it that must make sense before the fact of its first handle."""
        return {"pod": self.pod, "instance": self.instance, "size": self.size}


#: RM takes card memory in chunks of this size, however little is asked for, and reports only the size asked for
#: (video_mem.c:_vidmemPmaAllocate).
_CHUNK = 64 << 10
#: More mappings than this that go at once are forgotten in steps.
_MANY = 1 << 13
#: Stands for an allocation's number: memory that is on no card.
NO_ALLOCATION = 0


def charged_bytes(size: int) -> int:
    """Return how many bytes of the card an allocation takes."""
    return -(-size // _CHUNK) * _CHUNK


@dataclass(slots=True)
class Allocations:
    """All pods' memory."""

    memories: dict[int, Allocation] = field(default_factory=dict)
    by_handle: dict[Key, Allocation] = field(default_factory=dict)
    held: Counts[tuple[str, int]] = field(default_factory=Counts)
    #: By process: what UVM has mapped, and the bytes that could be managed memory (0 if there may be some later).
    mappings: dict[int, AddressSpace] = field(default_factory=dict)
    managed: dict[int, int] = field(default_factory=dict)
    #: By pod: the sums of what its processes' managed memory and, by card, page tables may take; in bytes.
    managed_of: Counts[str] = field(default_factory=Counts)
    #: By pod, what processes had that ended or no longer show it: another one may share the memory it is mapped in.
    managed_left: Counts[str] = field(default_factory=Counts)
    tables_of: Counts[tuple[str, bytes]] = field(default_factory=Counts, compare=False)
    #: How many processes of each pod are in ``managed``.
    managers: Counts[str] = field(default_factory=Counts, compare=False)
    #: How many allocations and mappings are known, by pod.
    records: Counts[str] = field(default_factory=Counts, compare=False)
    #: The mappings of each allocation, with their processes.
    _mapped: SetsByKey[int, tuple[int, Mapping]] = field(default_factory=SetsByKey)
    #: Mappings that are gone, mostly of ended processes, to be forgotten in steps; and allocations that are gone, each
    #: with a process that still lists mappings of it.
    _ending: list[tuple[int, AddressSpace, list[Mapping]]] = field(default_factory=list, compare=False)
    _dead: list[tuple[int, int]] = field(default_factory=list, compare=False)
    #: Up to where the last of these processes is looked through.
    _looked: Mapping | None = field(default=None, compare=False)
    #: The allocations that each carrier carries.
    _carried: SetsByKey[int, int] = field(default_factory=SetsByKey)
    #: By pod, its clients: one whose file is open elsewhere may keep what is pinned.
    clients: SetsByKey[str, int] = field(default_factory=SetsByKey, compare=False)
    #: How many times memory of a pod is carried, and the pods that ended while some was, or while they had clients.
    _carries: Counts[str] = field(default_factory=Counts)
    _ended: set[str] = field(default_factory=set)
    #: Pins of ended pods, to be removed in steps.
    _pins: dict[int, None] = field(default_factory=dict, compare=False)
    _last_carrier: int = field(default=0, compare=False)
    #: Pinned or carried allocations by pod, then by card and size, oldest first.
    _kept_by_size: dict[str, dict[tuple[int, int], dict[int, None]]] = field(default_factory=dict)
    _last: int = field(default=0, compare=False)

    def next_number(self) -> int:
        """Return the number for the next allocation."""
        return self._last + 1

    def allocate(self, key: Key, pod: str, instance: int, size: int, number: int) -> None:
        """Charge an allocation under its first handle."""
        self.keep(number, pod, instance, size)
        self.duplicate(key, number)

    def duplicate(self, key: Key, number: int) -> bool:
        """Add a handle to an allocation; False if the allocation is gone."""
        self.drop(key)
        if (memory := self.memories.get(number)) is None:
            return False
        memory.handles.add(key)
        self.by_handle[key] = memory
        return True

    def grow(self, number: int, size: int) -> None:
        """Charge an allocation at a larger size: that of memory in the making is known only once RM has made it."""
        memory = self.memories[number]
        if size > memory.size:
            self._change(memory, memory.pod, size)

    def keep(self, number: int, pod: str, instance: int, size: int) -> None:
        """Charge an allocation that has no handle now, unless it is charged already."""
        if number not in self.memories:
            self._last = max(self._last, number)
            self.memories[number] = Allocation(number, pod, instance, size)
            self._count(self.memories[number], 1)

    def pin(self, number: int) -> None:
        """Charge an allocation until every process and client of its pod is gone and no file carries its memory."""
        if (memory := self.memories.get(number)) is not None:
            memory.pinned = True
            self._pins.pop(number, None)
            self._add_kept(memory)

    def next_carrier(self) -> int:
        """Return an unused mark for a carrier."""
        self._last_carrier += 1
        return self._last_carrier

    def carries(self, pod: str) -> tuple[int, int]:
        """Return how many times memory of a pod, and of all pods, is carried."""
        return self._carries[pod], self._carries.total()

    def add_carrier(self, carrier: int, number: int) -> None:
        """Charge an allocation for as long as the file that carries it is open."""
        self._last_carrier = max(self._last_carrier, carrier)
        if (memory := self.memories.get(number)) is not None and carrier not in memory.carriers:
            memory.carriers.add(carrier)
            self._carried.add(carrier, number)
            self._carries.change(memory.pod, 1)
            self._add_kept(memory)

    def carrier_closed(self, carrier: int) -> None:
        """Record that a carrier is closed everywhere."""
        pods = set()
        for number in self._carried.pop(carrier, ()):
            memory = self.memories[number]
            memory.carriers.discard(carrier)
            self._carries.change(memory.pod, -1)
            pods.add(memory.pod)
            self._release_kept(memory)
        for pod in pods & self._ended:
            self.pod_ended(pod)

    def carriers(self) -> set[int]:
        """Return the marks of all files that carry memory."""
        return set(self._carried)

    def behind(self, keys: Iterable[Key]) -> list[Allocation]:
        """List the allocations behind handles, each once. It needs no lock."""
        found = {memory.number: memory for key in keys if (memory := self.by_handle.get(key)) is not None}
        return list(found.values())

    def transfer(self, keys: Iterable[Key], pod: str) -> None:
        """Charge the allocations behind a client's handles to another pod, except those with handles elsewhere."""
        before = set()
        for memory in self.behind(keys):
            if memory.pod == pod or len({client for client, _ in memory.handles}) > 1:
                continue
            before.add(memory.pod)
            self._change(memory, pod, memory.size)
        for other in before & self._ended:
            self.pod_ended(other)

    def _change(self, memory: Allocation, pod: str, size: int) -> None:
        self._count(memory, -1)
        self._carries.change(memory.pod, -len(memory.carriers))
        self._remove_kept(memory)
        memory.pod, memory.size = pod, size
        if memory.is_kept:
            self._add_kept(memory)
        self._carries.change(pod, len(memory.carriers))
        self._count(memory, 1)

    def drop(self, key: Key) -> None:
        """Remove a handle."""
        if (memory := self.by_handle.pop(key, None)) is not None:
            memory.handles.discard(key)
            self._discharge_if_unused(memory.number)

    def pod_ended(self, pod: str) -> None:
        """Record that a pod has no process; what a file or client elsewhere may still keep stays charged."""
        self.managed_left.pop(pod, None)
        if self._carries[pod] or pod in self.clients:
            self._ended.add(pod)
            return
        self._ended.discard(pod)
        for numbers in self._kept_by_size.pop(pod, {}).values():
            self._pins |= numbers

    def client_gone(self, pod: str, client: int) -> None:
        """Record that a client is gone, or another pod's."""
        self.clients.discard(pod, client)
        if pod not in self.clients and pod in self._ended:
            self.pod_ended(pod)

    def process_started(self, pod: str) -> None:
        """Record that a pod has a process; it may keep what is pinned."""
        self._ended.discard(pod)

    def kept_of_size(self, pod: str, instance: int, size: int, most: int) -> list[Allocation]:
        """List at most ``most`` pinned or carried allocations of a size, newest first."""
        numbers = reversed(self._kept_by_size.get(pod, {}).get((instance, size), {}))
        return [self.memories[number] for number in islice(numbers, most)]

    def _add_kept(self, memory: Allocation) -> None:
        like = memory.instance, memory.size
        self._kept_by_size.setdefault(memory.pod, {}).setdefault(like, {})[memory.number] = None

    def _remove_kept(self, memory: Allocation) -> None:
        like, sizes = (memory.instance, memory.size), self._kept_by_size.get(memory.pod, {})
        numbers = sizes.get(like, {})
        numbers.pop(memory.number, None)
        if not numbers:
            sizes.pop(like, None)
        if not sizes:
            self._kept_by_size.pop(memory.pod, None)

    def _release_kept(self, memory: Allocation) -> None:
        """Discharge an allocation if nothing keeps it after a pin or carrier was removed."""
        if not memory.is_kept:
            self._remove_kept(memory)
            self._discharge_if_unused(memory.number)

    def discharge_unused(self) -> None:
        """Discharge everything that nothing keeps, after a rebuild from facts of different moments."""
        for number in list(self.memories):
            self._discharge_if_unused(number)

    def map(self, pid: int, base: int, length: int, uuid: bytes, number: int, pod: str = "") -> None:
        """Record that UVM may have mapped an allocation; earlier mappings there still count, as this one may fail."""
        if (space := self.mappings.get(pid)) is None:
            space = self.mappings[pid] = AddressSpace(pod)
        self._add(pid, space, Mapping(base, base + length, uuid, number))

    def unmap(self, pid: int, base: int, length: int, uuid: bytes | None = None, *, whole: bool = False) -> None:
        """Record that UVM has unmapped a range, for one card or for all; only ``whole`` mappings, or parts of them."""
        if (space := self.mappings.get(pid)) is None:
            return
        end = base + length
        gone = space.take(base, end, uuid, whole=whole)
        for each in gone:
            if each.base < base:
                self._add(pid, space, each._replace(end=base), is_piece=True)
            if each.end > end:
                self._add(pid, space, each._replace(base=end), is_piece=True)
        if not space.by_kind:
            del self.mappings[pid]
        if len(gone) > _MANY:
            self._ending.append((pid, space, gone))
        else:
            self._unmapped(pid, space, gone)

    def space_of(self, pid: int) -> AddressSpace:
        """Return what UVM has mapped of a process, to look at."""
        return self.mappings.get(pid) or AddressSpace("")

    def _add(self, pid: int, space: AddressSpace, mapping: Mapping, *, is_piece: bool = False) -> None:
        if space.add(mapping, is_piece=is_piece):
            self._mapped.add(mapping.memory, (pid, mapping))
            self.records.change(space.pod, 1)
            self._count_tables(space, mapping.uuid, mapping.tables)

    def _count_tables(self, space: AddressSpace, uuid: bytes, more: int) -> None:
        """Count page tables of a process, and the most that it has had for its pod."""
        space.tables[uuid] += more
        added = space.tables[uuid] - space.most_tables[uuid]
        if added > 0:
            space.most_tables[uuid] += added
            self.tables_of[space.pod, uuid] += added
        elif not space.tables[uuid]:
            self._discharge_tables(space, uuid)

    def _discharge_tables(self, space: AddressSpace, uuid: bytes) -> None:
        self.tables_of.change((space.pod, uuid), -space.most_tables.pop(uuid, 0))
        del space.tables[uuid]

    def set_managed(self, pid: int, size: int, pod: str = "") -> None:
        """Charge a process for the bytes that it could have as managed memory."""
        self.managers[pod] += pid not in self.managed
        self.managed_of.change(pod, size - self.managed.get(pid, 0))
        self.managed[pid] = size

    def _unmapped(self, pid: int, space: AddressSpace, gone: list[Mapping]) -> None:
        self.records.change(space.pod, -len(gone))
        for each in gone:
            if each.uuid in space.tables:  # else the process has ended
                self._count_tables(space, each.uuid, -each.tables)
            if each.memory in self._mapped:
                self._mapped.discard(each.memory, (pid, each))
                self._discharge_if_unused(each.memory)

    def exited(self, pid: int, pod: str = "") -> None:
        """Forget a process's address space, and its mappings in steps; what could be managed memory its pod keeps."""
        if (size := self.managed.pop(pid, None)) is not None:
            self.managers.change(pod, -1)
            self.managed_of.change(pod, -size)
            self.managed_left.change(pod, size)
        if (space := self.mappings.pop(pid, None)) is not None:
            for uuid in list(space.tables):
                self._discharge_tables(space, uuid)
            gone, space.by_kind = space.mappings, {}
            self._ending.append((pid, space, gone))

    @property
    def is_forgetting(self) -> bool:
        """Tell whether mappings or pins remain to be forgotten."""
        return bool(self._ending or self._dead or self._pins)

    def forget_some(self, most: int) -> bool:
        """Forget at most ``most`` mappings and pins that are gone; True if more remain."""
        while self._ending and most > 0:
            pid, space, mapped = self._ending[-1]
            some = mapped[-most:]
            del mapped[-most:]
            self._unmapped(pid, space, some)
            most -= len(some)
            if not mapped:
                self._ending.pop()
        while self._dead and most > 0:
            number, pid = self._dead[-1]
            reach = self.space_of(pid).following(self._looked, most)
            self._remove(pid, [each for each in reach if each.memory == number])
            most -= max(1, len(reach))
            self._looked = reach[-1] if reach else None
            if not reach:
                self._dead.pop()
        while self._pins and most > 0:
            most -= 1
            if (memory := self.memories.get(self._pins.popitem()[0])) is not None:
                memory.pinned = False
                self._release_kept(memory)
        return self.is_forgetting

    def _remove(self, pid: int, mappings: list[Mapping]) -> None:
        """Remove mappings of a process; one that has ended lists none."""
        if (space := self.mappings.get(pid)) is not None:
            self._unmapped(pid, space, space.remove(mappings))
            if not space.by_kind:
                del self.mappings[pid]

    def facts(self) -> Iterator[dict[str, Any]]:
        """Yield the facts beyond those of objects: mappings, charged allocations, managed memory.

        What keeps an allocation comes before the allocation, so that something keeps it from the start. Which pods
        ended comes first, because their last clients may go meanwhile, and after what files carry.
        """
        yield from self._ended_facts()
        for pid, space in list(self.mappings.items()):
            for mapping in space.walk():
                if (pid, mapping) not in self._mapped.of(mapping.memory):
                    continue  # its allocation is gone
                length = mapping.end - mapping.base
                where = {"pid": pid, "base": mapping.base, "length": length, "uuid": mapping.uuid.hex()}
                yield {"fact": "map", **where, "memory": mapping.memory}
        for number, memory in while_there(self.memories):
            pinned = memory.pinned and number not in self._pins
            yield {"fact": "kept", "memory": number, **memory.whose, "pinned": pinned}
            yield from ({"fact": "carrier", "carrier": each, "memory": number} for each in sorted(memory.carriers))
        yield from self._ended_facts()
        for pid, size in while_there(self.managed):
            yield {"fact": "managed", "pid": pid, "bytes": size}
        for pod in list(self.managed_left):  # after what processes have: one that ends meanwhile leaves that
            yield {"fact": "managed_left", "pod": pod, "bytes": self.managed_left[pod]}

    def _ended_facts(self) -> Iterator[dict[str, Any]]:
        for pod in sorted(self._ended):
            if pod in self._ended:
                yield {"fact": "ended", "name": pod}

    def _discharge_if_unused(self, number: int) -> None:
        memory = self.memories.get(number)
        if memory is not None and not memory.handles and not memory.is_kept and not self.is_mapped(number):
            self._count(memory, -1)
            del self.memories[number]

    def _count(self, memory: Allocation, times: int) -> None:
        self.records.change(memory.pod, times)
        self.held.change((memory.pod, memory.instance), times * charged_bytes(memory.size))

    def among(self, mappings: Iterable[Mapping], base: int, uuid: bytes | None) -> list[Allocation]:
        """List the allocations among mappings that end above an address, for one card or for all. It needs no lock."""
        numbers = {each.memory for each in mappings if base < each.end and uuid in (None, each.uuid)}
        return [memory for number in sorted(numbers) if (memory := self.memories.get(number)) is not None]

    def unmap_all(self, number: int) -> None:
        """Forget the recorded mappings of an allocation that is gone; in steps if they are many."""
        gone = self._mapped.pop(number, set())
        self._discharge_if_unused(number)
        if len(gone) > _MANY:
            self._dead[:0] = [(number, pid) for pid in {pid for pid, _ in gone}]
            return
        by_process: dict[int, list[Mapping]] = {}
        for pid, mapping in gone:
            by_process.setdefault(pid, []).append(mapping)
        for pid, mappings in by_process.items():
            self._remove(pid, mappings)

    def mapped_by(self, number: int) -> set[int]:
        """Return the processes of which UVM is recorded to have mapped an allocation."""
        return {pid for pid, _ in self._mapped.of(number)}

    def is_mapped(self, number: int) -> bool:
        """Tell whether UVM is recorded to have mapped an allocation. It needs no lock."""
        return number in self._mapped
