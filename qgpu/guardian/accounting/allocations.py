"""What memory pods hold: allocations on a card, who refers to each, and the address space that could be managed memory.

An allocation is charged to the pod that made it for as long as anything keeps it alive: a handle, a duplicate, a
mapping in UVM, an open file that carries it, be that in another pod or in a message in flight, or what nobody here
sees. What is allowed is decided elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Key = tuple[int, int]


@dataclass(slots=True)
class Allocation:
    """One allocation on a card, by its number here; ``size`` is RM's word."""

    number: int
    pod: str
    instance: int
    size: int
    handles: set[Key] = field(default_factory=set)
    #: Files that carry it, by the marks they have in ``FileSets.carriers``.
    carriers: set[int] = field(default_factory=set)
    #: Something may keep it that is not seen: it counts until the pod has no process and nothing carries memory of it.
    pinned: bool = False

    @property
    def size_class(self) -> tuple[int, int]:
        """What memory that comes back by a descriptor is looked for by: card and size."""
        return self.instance, self.size


#: RM takes the card's memory in pieces of this, however little is asked for, and tells of what was asked for only
#: (video_mem.c:_vidmemPmaAllocate).
_PIECE = 64 << 10
#: Up to so many mappings are taken out of a process's one by one; more than _MANY are forgotten bit by bit.
_FEW, _MANY = 64, 1 << 16
#: In the place of an allocation's number: memory that is on no card.
NOBODYS = 0
#: A page table on the card, and what of the address space one covers by level, as powers of 2, from that of the
#: smallest pages up (uvm_hopper_mmu.c; older ones are the same but for the uppermost).
_TABLE, _LEVELS = 4 << 10, (21, 29, 38, 47)


def table_bytes(base: int, length: int) -> int:
    """Return what a mapping with nothing else near it can take of a card for page tables, in bytes."""
    last = base + max(length, 1) - 1
    return _TABLE * sum((last >> level) - (base >> level) + 1 for level in _LEVELS)


def taken(size: int) -> int:
    """Return what an allocation takes of the card, in bytes."""
    return -(-size // _PIECE) * _PIECE


class Mapping(NamedTuple):
    """Memory mapped by UVM for one card, from ``base`` to ``end`` of a process's address space."""

    base: int
    end: int
    uuid: bytes
    memory: int


@dataclass(slots=True)
class _Mappings:
    """One process's, in order, with the length of the longest there has been: it bounds where to look for a range's."""

    all: list[Mapping] = field(default_factory=list)
    longest: int = field(default=0, compare=False)

    def after(self, base: int) -> list[Mapping]:
        """Return the first that begins behind an address, if there is one."""
        at = bisect_left(self.all, (base + 1,))
        return self.all[at : at + 1]

    def within(self, base: int, end: int) -> slice:
        """Return where all that reach into a range lie, with some that do not."""
        return slice(bisect_left(self.all, (base - self.longest,)), bisect_left(self.all, (end,)))


@dataclass(slots=True)
class Allocations:
    """All pods' memory."""

    memories: dict[int, Allocation] = field(default_factory=dict)
    by_handle: dict[Key, Allocation] = field(default_factory=dict)
    held: Counter[tuple[str, int]] = field(default_factory=Counter)
    #: By process: what UVM has mapped, and bytes that could be managed memory (0 where UVM was initialised only).
    mappings: dict[int, _Mappings] = field(default_factory=dict)
    managed: dict[int, int] = field(default_factory=dict)
    #: The mappings of each allocation, with their processes.
    _mapped: dict[int, set[tuple[int, Mapping]]] = field(default_factory=dict)
    #: Mappings that are gone, of processes that have ended for the most part, to be forgotten bit by bit.
    _ending: list[tuple[int, list[Mapping]]] = field(default_factory=list, compare=False)
    #: What each carrier carries.
    _carried: dict[int, set[int]] = field(default_factory=dict)
    #: How often memory of a pod is carried, and pods that have ended while some was.
    _carries: Counter[str] = field(default_factory=Counter)
    _ended: set[str] = field(default_factory=set)
    #: Pins of pods that have ended, to be taken away bit by bit.
    _pins: dict[int, None] = field(default_factory=dict, compare=False)
    _last_carrier: int = field(default=0, compare=False)
    #: What page tables may take, by process and card; and the most that was, for UVM gives the card a piece of 2 MiB
    #: back only when no table lies in it any more.
    _tables: Counter[tuple[int, bytes]] = field(default_factory=Counter)
    _most_tables: Counter[tuple[int, bytes]] = field(default_factory=Counter, compare=False)
    #: What is pinned or carried, by pod, and by card and size, oldest first.
    _out: dict[str, dict[tuple[int, int], dict[int, None]]] = field(default_factory=dict)
    _last: int = field(default=0, compare=False)

    def next_number(self) -> int:
        """Return the number that the next allocation can have."""
        return self._last + 1

    def allocate(self, key: Key, pod: str, instance: int, size: int, number: int) -> None:
        """Charge an allocation under its first handle."""
        self.drop(key)
        self.keep(number, pod, instance, size)
        self._name(self.memories[number], key)

    def duplicate(self, key: Key, number: int) -> bool:
        """Add a handle to an allocation; False when that is no more."""
        self.drop(key)
        if (memory := self.memories.get(number)) is None:
            return False
        self._name(memory, key)
        return True

    def keep(self, number: int, pod: str, instance: int, size: int) -> None:
        """Charge an allocation that has no handle yet, or any more; no harm if it is charged."""
        if number in self.memories:
            return
        self._last = max(self._last, number)
        self.memories[number] = Allocation(number, pod, instance, size)
        self._count(self.memories[number], 1)

    def pin(self, number: int) -> None:
        """Let an allocation count until every process of its pod has ended, and nothing carries memory of the pod."""
        if (memory := self.memories.get(number)) is not None:
            memory.pinned = True
            self._pins.pop(number, None)
            self._go_out(memory)

    def next_carrier(self) -> int:
        """Return a mark for a carrier, which no other gets."""
        self._last_carrier += 1
        return self._last_carrier

    def carries(self, pod: str) -> int:
        """Return how often memory of a pod is carried."""
        return self._carries[pod]

    def carry(self, carrier: int, number: int) -> None:
        """Let an allocation count for as long as a file is open that carries it."""
        self._last_carrier = max(self._last_carrier, carrier)
        if (memory := self.memories.get(number)) is not None and carrier not in memory.carriers:
            memory.carriers.add(carrier)
            self._carried.setdefault(carrier, set()).add(number)
            self._carries[memory.pod] += 1
            self._go_out(memory)

    def carrier_closed(self, carrier: int) -> None:
        """Take note that nobody has a carrier open any more."""
        pods = set()
        for number in self._carried.pop(carrier, ()):
            memory = self.memories[number]
            memory.carriers.discard(carrier)
            self._carries[memory.pod] -= 1
            pods.add(memory.pod)
            self._come_in(memory)
        for pod in pods & self._ended:
            self.pod_ended(pod)

    def carriers(self) -> set[int]:
        """Return the marks of all that carries something."""
        return set(self._carried)

    def give(self, keys: Iterable[Key], pod: str) -> None:
        """Charge the allocations behind handles of one client to another pod, but those with a handle elsewhere."""
        found = {memory.number: memory for key in keys if (memory := self.by_handle.get(key)) is not None}
        before = set()
        for memory in found.values():
            if memory.pod == pod or len({client for client, _ in memory.handles}) > 1:
                continue
            before.add(memory.pod)
            self._count(memory, -1)
            self._carries[memory.pod] -= len(memory.carriers)
            self._no_longer_out(memory)
            memory.pod = pod
            if memory.pinned or memory.carriers:
                self._go_out(memory)
            self._carries[memory.pod] += len(memory.carriers)
            self._count(memory, 1)
        for other in before & self._ended:
            self.pod_ended(other)

    def drop(self, key: Key) -> None:
        """Take a handle away."""
        if (memory := self.by_handle.pop(key, None)) is not None:
            memory.handles.discard(key)
            self._settle(memory)

    def pod_ended(self, pod: str) -> None:
        """Take note that a pod has no process any more. What somebody elsewhere can still take in stays charged."""
        if self._carries[pod]:
            self._ended.add(pod)
            return
        self._ended.discard(pod)
        del self._carries[pod]
        for numbers in self._out.pop(pod, {}).values():
            self._pins |= numbers

    def pod_begins(self, pod: str) -> None:
        """Take note that a pod has a process: what is pinned may be this one's."""
        self._ended.discard(pod)

    def out(self, pod: str, instance: int, size: int) -> list[Allocation]:
        """List what is pinned or carried of a size, newest first."""
        return [self.memories[number] for number in reversed(self._out.get(pod, {}).get((instance, size), {}))]

    def _go_out(self, memory: Allocation) -> None:
        self._out.setdefault(memory.pod, {}).setdefault(memory.size_class, {})[memory.number] = None

    def _no_longer_out(self, memory: Allocation) -> None:
        sizes = self._out.get(memory.pod, {})
        numbers = sizes.get(memory.size_class, {})
        numbers.pop(memory.number, None)
        if not numbers:
            sizes.pop(memory.size_class, None)
        if not sizes:
            self._out.pop(memory.pod, None)

    def _come_in(self, memory: Allocation) -> None:
        """Discharge what nothing keeps once a pin or a carrier was taken away."""
        if not memory.pinned and not memory.carriers:
            self._no_longer_out(memory)
            self._settle(memory)

    def settle(self) -> None:
        """Discharge whatever nothing keeps: for one that was rebuilt from facts of different moments."""
        for memory in list(self.memories.values()):
            self._settle(memory)

    def map(self, pid: int, base: int, length: int, uuid: bytes, number: int) -> None:
        """Note that UVM may have mapped an allocation; what was mapped there before counts on, for it may have not."""
        mapped = self.mappings.setdefault(pid, _Mappings())
        self._add(pid, mapped, Mapping(base, base + length, uuid, number))

    def unmap(self, pid: int, base: int, length: int, uuid: bytes | None = None) -> None:
        """Note that UVM has unmapped what it had in a range, for one card or for all."""
        if (mapped := self.mappings.get(pid)) is None:
            return
        end = base + length
        place = mapped.within(base, end)
        gone = [each for each in mapped.all[place] if each.end > base and uuid in (None, each.uuid)]
        if not gone:
            return
        mapped.all[place] = [each for each in mapped.all[place] if each.end <= base or uuid not in (None, each.uuid)]
        for each in gone:
            if each.base < base:
                self._add(pid, mapped, each._replace(end=base))
            if each.end > end:
                self._add(pid, mapped, each._replace(base=end))
        if not mapped.all:
            del self.mappings[pid]
        if len(gone) > _MANY:
            self._ending.append((pid, gone))
        else:
            self._unmapped(pid, gone)

    def _add(self, pid: int, mapped: _Mappings, mapping: Mapping) -> None:
        at = bisect_left(mapped.all, mapping)
        if not self._is_there(mapped, mapping):
            mapped.all.insert(at, mapping)
            mapped.longest = max(mapped.longest, mapping.end - mapping.base)
            self._mapped.setdefault(mapping.memory, set()).add((pid, mapping))
            whose = pid, mapping.uuid
            self._tables[whose] += table_bytes(mapping.base, mapping.end - mapping.base)
            self._most_tables[whose] = max(self._most_tables[whose], self._tables[whose])

    def mappings_of(self, pid: int) -> int:
        """Return how many mappings there are of a process's."""
        return len(self.mappings[pid].all) if pid in self.mappings else 0

    def tables(self, pid: int, uuid: bytes) -> int:
        """Return what a process's mappings may take, or may have taken, of a card for page tables, in bytes."""
        return self._most_tables[pid, uuid]

    def more_tables(self, pid: int, uuid: bytes, base: int, length: int) -> int:
        """Return how much more of a card page tables may take with one more mapping, in bytes."""
        return max(0, self._tables[pid, uuid] + table_bytes(base, length) - self._most_tables[pid, uuid])

    def _unmapped(self, pid: int, gone: Iterable[Mapping]) -> None:
        for each in gone:
            self._tables[pid, each.uuid] -= table_bytes(each.base, each.end - each.base)
            if not self._tables[pid, each.uuid]:
                del self._tables[pid, each.uuid], self._most_tables[pid, each.uuid]
            if (left := self._mapped.get(each.memory)) is not None:
                left.discard((pid, each))
                if not left:
                    del self._mapped[each.memory]
                    self._settle(self.memories.get(each.memory))

    def exited(self, pid: int) -> None:
        """Forget what hung on a process's address space: its mappings bit by bit, which ``forget_some`` does."""
        self.managed.pop(pid, None)
        if (mapped := self.mappings.pop(pid, None)) is not None:
            self._ending.append((pid, mapped.all))

    @property
    def is_forgetting(self) -> bool:
        """Tell whether mappings or pins that are gone are still to be forgotten."""
        return bool(self._ending or self._pins)

    def forget_some(self, most: int) -> bool:
        """Forget up to so many mappings and pins that are gone; True when more are left."""
        while self._ending and most > 0:
            pid, mapped = self._ending[-1]
            some = mapped[-most:]
            del mapped[-most:]
            self._unmapped(pid, some)
            most -= len(some)
            if not mapped:
                self._ending.pop()
        while self._pins and most > 0:
            most -= 1
            if (memory := self.memories.get(self._pins.popitem()[0])) is not None:
                memory.pinned = False
                self._come_in(memory)
        return self.is_forgetting

    def facts(self) -> Iterator[dict[str, Any]]:
        """Say what the facts of objects do not: mappings, what is charged, managed memory.

        What keeps an allocation comes before it, so that it is kept by something from the first.
        """
        for pid in list(self.mappings):
            for mapping in self._walk(pid):
                length = mapping.end - mapping.base
                where = {"pid": pid, "base": mapping.base, "length": length, "uuid": mapping.uuid.hex()}
                yield {"fact": "map", **where, "memory": mapping.memory}
        for number in list(self.memories):
            if (memory := self.memories.get(number)) is not None:
                whose = {"pod": memory.pod, "instance": memory.instance, "size": memory.size}
                yield {"fact": "kept", "memory": number, **whose, "pinned": memory.pinned and number not in self._pins}
                yield from ({"fact": "carry", "carrier": each, "memory": number} for each in sorted(memory.carriers))
        for pod in sorted(self._ended):
            if pod in self._ended:
                yield {"fact": "ended", "name": pod}
        for pid in list(self.managed):
            if pid in self.managed:
                yield {"fact": "managed", "pid": pid, "bytes": self.managed[pid]}

    def _walk(self, pid: int) -> Iterator[Mapping]:
        """Yield a process's mappings in order, though they may come, go and be cut in two meanwhile."""
        base = -1
        while (mapped := self.mappings.get(pid)) and (rest := mapped.after(base)):
            base, said = rest[0].base, set()
            while (mapped := self.mappings.get(pid)) is not None:
                here = mapped.all[bisect_left(mapped.all, (base,)) : bisect_left(mapped.all, (base + 1,))]
                if (more := next((each for each in here if each not in said), None)) is None:
                    break
                said.add(more)
                yield more

    def _is_there(self, mapped: _Mappings, mapping: Mapping) -> bool:
        at = bisect_left(mapped.all, mapping)
        return mapped.all[at : at + 1] == [mapping]

    def _name(self, memory: Allocation, key: Key) -> None:
        memory.handles.add(key)
        self.by_handle[key] = memory

    def _settle(self, memory: Allocation | None) -> None:
        """Discharge an allocation that nothing keeps alive."""
        if memory is None or memory.number not in self.memories:
            return
        if memory.handles or memory.pinned or memory.carriers or self.is_mapped(memory.number):
            return
        self._count(memory, -1)
        del self.memories[memory.number]

    def _count(self, memory: Allocation, times: int) -> None:
        whose = memory.pod, memory.instance
        self.held[whose] += times * taken(memory.size)
        if not self.held[whose]:
            del self.held[whose]

    def mapped_in(self, pid: int, base: int, length: int, uuid: bytes | None) -> list[Allocation]:
        """List the allocations that UVM has mapped in a range, for one card or for all."""
        if (mapped := self.mappings.get(pid)) is None:
            return []
        reach = mapped.all[mapped.within(base, base + length)]
        numbers = {each.memory for each in reach if base < each.end and uuid in (None, each.uuid)}
        return [self.memories[number] for number in sorted(numbers) if number in self.memories]

    def unmap_all(self, number: int) -> None:
        """Forget what was said to be mapped of an allocation that is gone."""
        by_process: dict[int, list[Mapping]] = {}
        for pid, mapping in self._mapped.get(number, ()):
            by_process.setdefault(pid, []).append(mapping)
        for pid, gone in by_process.items():
            if (mapped := self.mappings.get(pid)) is not None:
                self._take_out(mapped, gone)
                if not mapped.all:
                    del self.mappings[pid]
            self._unmapped(pid, gone)

    def _take_out(self, mapped: _Mappings, gone: list[Mapping]) -> None:
        """Take some mappings out of the list: one by one where these are few, for a process can have very many."""
        if len(gone) > _FEW:
            out = set(gone)
            mapped.all = [each for each in mapped.all if each not in out]
            return
        for each in gone:
            at = bisect_left(mapped.all, each)
            if mapped.all[at : at + 1] == [each]:
                del mapped.all[at]

    def is_mapped(self, number: int) -> bool:
        """Tell whether UVM is said to have mapped an allocation."""
        return number in self._mapped
