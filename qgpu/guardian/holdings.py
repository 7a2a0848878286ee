"""What memory pods hold: allocations on a card, who refers to each, and the address space that could be managed memory.

An allocation is charged to the pod that made it for as long as anything of that pod's keeps it alive: a handle, a
duplicate, a mapping in UVM, or what nobody here sees, such as a descriptor it was exported to. What is allowed is
decided elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Key = tuple[int, int]


@dataclass(slots=True)
class Memory:
    """One allocation on a card, by its number here."""

    number: int
    pod: str
    instance: int
    size: int
    handles: set[Key] = field(default_factory=set)
    #: Something may keep it that is not seen: it counts until every process of the pod has ended.
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Mapping:
    """Memory mapped by UVM for one card, from ``base`` to ``end`` of a process's address space."""

    base: int
    end: int
    uuid: bytes
    memory: int


@dataclass(slots=True)
class Holdings:
    """All pods' memory."""

    memories: dict[int, Memory] = field(default_factory=dict)
    by_handle: dict[Key, Memory] = field(default_factory=dict)
    held: Counter[tuple[str, int]] = field(default_factory=Counter)
    #: By process: what UVM has mapped, and bytes that could be managed memory (0 where UVM was initialised only).
    mappings: dict[int, list[Mapping]] = field(default_factory=dict)
    managed: dict[int, int] = field(default_factory=dict)
    _last: int = 0

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
        """Charge an allocation that has no handle any more, only what else keeps it."""
        self._last = max(self._last, number)
        self.memories[number] = Memory(number, pod, instance, size)
        self.held[pod, instance] += size

    def pin(self, number: int) -> None:
        """Let an allocation count until every process of its pod has ended."""
        if (memory := self.memories.get(number)) is not None:
            memory.pinned = True

    def drop(self, key: Key) -> None:
        """Take a handle away."""
        if (memory := self.by_handle.pop(key, None)) is not None:
            memory.handles.discard(key)
            self._settle(memory)

    def pod_ended(self, pod: str) -> None:
        """Take note that a pod has no process any more."""
        for memory in [memory for memory in self.memories.values() if memory.pod == pod and memory.pinned]:
            memory.pinned = False
            self._settle(memory)

    def map(self, pid: int, base: int, length: int, uuid: bytes, number: int) -> None:
        """Note that UVM may have mapped an allocation; what was mapped there before counts on, for it may have not."""
        mapping = Mapping(base, base + length, uuid, number)
        if mapping not in (mapped := self.mappings.setdefault(pid, [])):
            mapped.append(mapping)

    def unmap(self, pid: int, base: int, length: int, uuid: bytes | None = None) -> None:
        """Note that UVM has unmapped what it had in a range, for one card or for all."""
        end, kept, gone = base + length, [], set()
        for mapping in self.mappings.get(pid, ()):
            if mapping.end <= base or mapping.base >= end or uuid not in (None, mapping.uuid):
                kept.append(mapping)
                continue
            gone.add(mapping.memory)
            if mapping.base < base:
                kept.append(Mapping(mapping.base, base, mapping.uuid, mapping.memory))
            if mapping.end > end:
                kept.append(Mapping(end, mapping.end, mapping.uuid, mapping.memory))
        if gone:
            self.mappings[pid] = kept
            for number in gone:
                self._settle(self.memories.get(number))

    def exited(self, pid: int) -> None:
        """Forget what hung on a process's address space."""
        self.managed.pop(pid, None)
        for number in {mapping.memory for mapping in self.mappings.pop(pid, ())}:
            self._settle(self.memories.get(number))

    def facts(self) -> Iterator[dict[str, Any]]:
        """Say what the facts of objects do not: pins, mappings, managed memory."""
        for memory in self.memories.values():
            if memory.pinned:
                yield {"fact": "pin", "memory": memory.number}
        for pid, mappings in self.mappings.items():
            for mapping in mappings:
                yield {
                    "fact": "map",
                    "pid": pid,
                    "base": mapping.base,
                    "length": mapping.end - mapping.base,
                    "uuid": mapping.uuid.hex(),
                    "memory": mapping.memory,
                }
        for pid, held in self.managed.items():
            yield {"fact": "managed", "pid": pid, "bytes": held}

    def _name(self, memory: Memory, key: Key) -> None:
        memory.handles.add(key)
        self.by_handle[key] = memory

    def _settle(self, memory: Memory | None) -> None:
        """Discharge an allocation that nothing keeps alive."""
        if memory is None or memory.number not in self.memories:
            return
        if memory.handles or memory.pinned or self.is_mapped(memory.number):
            return
        self.held[memory.pod, memory.instance] -= memory.size
        del self.memories[memory.number]

    def mapped_in(self, pid: int, base: int, length: int, uuid: bytes | None) -> list[Memory]:
        """List the allocations that UVM has mapped in a range, for one card or for all."""
        end = base + length
        numbers = {
            mapping.memory
            for mapping in self.mappings.get(pid, ())
            if mapping.base < end and base < mapping.end and uuid in (None, mapping.uuid)
        }
        return [self.memories[number] for number in sorted(numbers) if number in self.memories]

    def unmap_all(self, number: int) -> None:
        """Forget what was said to be mapped of an allocation that is gone."""
        for pid, mappings in self.mappings.items():
            self.mappings[pid] = [mapping for mapping in mappings if mapping.memory != number]

    def is_mapped(self, number: int) -> bool:
        """Tell whether UVM is said to have mapped an allocation."""
        return any(mapping.memory == number for mappings in self.mappings.values() for mapping in mappings)
