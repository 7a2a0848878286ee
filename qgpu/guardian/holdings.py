"""What memory pods hold: allocations on a card, who refers to each, and the address space that could be managed memory.

An allocation is charged to the pod that made it for as long as anything of that pod's keeps it alive: a handle, a
duplicate, a mapping in UVM, or what nobody here sees, such as a descriptor it was exported to. What is allowed is
decided elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Key = tuple[int, int]


@dataclass(slots=True)
class Memory:
    """One allocation on a card, by its number here; ``size`` is RM's word."""

    number: int
    pod: str
    instance: int
    size: int
    handles: set[Key] = field(default_factory=set)
    #: Something may keep it that is not seen: it counts until every process of the pod has ended.
    pinned: bool = False


#: RM takes the card's memory in pieces of this, however little is asked for, and tells of what was asked for only
#: (video_mem.c:_vidmemPmaAllocate).
_PIECE = 64 << 10
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
class Holdings:
    """All pods' memory."""

    memories: dict[int, Memory] = field(default_factory=dict)
    by_handle: dict[Key, Memory] = field(default_factory=dict)
    held: Counter[tuple[str, int]] = field(default_factory=Counter)
    #: By process: what UVM has mapped, and bytes that could be managed memory (0 where UVM was initialised only).
    mappings: dict[int, _Mappings] = field(default_factory=dict)
    managed: dict[int, int] = field(default_factory=dict)
    #: How many mappings there are of each allocation.
    _mapped: Counter[int] = field(default_factory=Counter)
    #: What page tables may take, by process and card; and the most that was, for UVM gives the card a piece of 2 MiB
    #: back only when no table lies in it any more.
    _tables: Counter[tuple[int, bytes]] = field(default_factory=Counter)
    _most_tables: Counter[tuple[int, bytes]] = field(default_factory=Counter, compare=False)
    #: What is pinned, by pod, card and size, oldest first.
    _pinned: dict[tuple[str, int, int], dict[int, None]] = field(default_factory=dict)
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
        self.memories[number] = Memory(number, pod, instance, size)
        self.held[pod, instance] += taken(size)

    def pin(self, number: int) -> None:
        """Let an allocation count until every process of its pod has ended."""
        if (memory := self.memories.get(number)) is not None:
            memory.pinned = True
            self._pinned.setdefault((memory.pod, memory.instance, memory.size), {})[number] = None

    def drop(self, key: Key) -> None:
        """Take a handle away."""
        if (memory := self.by_handle.pop(key, None)) is not None:
            memory.handles.discard(key)
            self._settle(memory)

    def pod_ended(self, pod: str) -> None:
        """Take note that a pod has no process any more."""
        for key in [key for key in self._pinned if key[0] == pod]:
            for number in self._pinned.pop(key):
                self.memories[number].pinned = False
                self._settle(self.memories[number])

    def pinned(self, pod: str, instance: int, size: int) -> list[Memory]:
        """List what is pinned of a size, newest first."""
        return [self.memories[number] for number in reversed(self._pinned.get((pod, instance, size), {}))]

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
        self._unmapped(pid, gone)

    def _add(self, pid: int, mapped: _Mappings, mapping: Mapping) -> None:
        at = bisect_left(mapped.all, mapping)
        if not self._is_there(mapped, mapping):
            mapped.all.insert(at, mapping)
            mapped.longest = max(mapped.longest, mapping.end - mapping.base)
            self._mapped[mapping.memory] += 1
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
            self._mapped[each.memory] -= 1
            if not self._mapped[each.memory]:
                del self._mapped[each.memory]
                self._settle(self.memories.get(each.memory))

    def exited(self, pid: int) -> None:
        """Forget what hung on a process's address space."""
        self.managed.pop(pid, None)
        if (mapped := self.mappings.pop(pid, None)) is not None:
            self._unmapped(pid, mapped.all)

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
                yield {"fact": "kept", "memory": number, **whose, "pinned": memory.pinned}
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

    def _name(self, memory: Memory, key: Key) -> None:
        memory.handles.add(key)
        self.by_handle[key] = memory

    def _settle(self, memory: Memory | None) -> None:
        """Discharge an allocation that nothing keeps alive."""
        if memory is None or memory.number not in self.memories:
            return
        if memory.handles or memory.pinned or self.is_mapped(memory.number):
            return
        whose = memory.pod, memory.instance
        self.held[whose] -= taken(memory.size)
        if not self.held[whose]:
            del self.held[whose]
        del self.memories[memory.number]

    def mapped_in(self, pid: int, base: int, length: int, uuid: bytes | None) -> list[Memory]:
        """List the allocations that UVM has mapped in a range, for one card or for all."""
        if (mapped := self.mappings.get(pid)) is None:
            return []
        reach = mapped.all[mapped.within(base, base + length)]
        numbers = {each.memory for each in reach if base < each.end and uuid in (None, each.uuid)}
        return [self.memories[number] for number in sorted(numbers) if number in self.memories]

    def unmap_all(self, number: int) -> None:
        """Forget what was said to be mapped of an allocation that is gone."""
        for pid, mapped in list(self.mappings.items()) if self.is_mapped(number) else ():
            gone = [each for each in mapped.all if each.memory == number]
            mapped.all = [each for each in mapped.all if each.memory != number]
            if not mapped.all:
                del self.mappings[pid]
            self._unmapped(pid, gone)

    def is_mapped(self, number: int) -> bool:
        """Tell whether UVM is said to have mapped an allocation."""
        return number in self._mapped
