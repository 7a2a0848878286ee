"""How many GPFIFO entries a card takes from pods' channels: their progress, in units of their own.

A channel's GPFIFO is a ring. The card advances GP_GET, an index into it, as it takes entries; it is read often enough
that the ring does not wrap in between. A channel that moves is read every 4 ms, so with 1,024 entries up to 256,000 a
second are counted right. An advance counts as unknown if the ring may have wrapped: where a read was so late that
100,000 entries a second would have wrapped it, and where a channel moves after a rest.

The pod can write to this memory too. So a count is a hint, and one read adds less than the size of a ring.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.rm_object import RmObject
from qgpu.guardian.gpu import userd_mapping
from qgpu.guardian.gpu.userd_mapping import MappedDevice, ProcessMemory, Slot, mapped_device
from qgpu.linux.pod_threads import PodThreads
from qgpu.model import NS_PER_MS, NS_PER_S
from qgpu.nvidia import abi
from qgpu.nvidia.rm_device import RmDevice

#: How often a channel is read that moves, and one that has rested for _MOVED_LATELY_NS. A read of card memory takes 7
#: to 9 us, and a program uses one or two of its eight compute channels.
_MOVING_NS, _RESTING_NS = 4 * NS_PER_MS, 20 * NS_PER_MS
_MOVED_LATELY_NS = 10 * NS_PER_S
#: How many entries a second the busiest program takes that was measured, an eager one with small kernels.
_FASTEST = 100_000
#: A count is unknown if the pod's channels were not read for this long: its thread is stuck.
_STUCK_NS = 3 * _RESTING_NS
#: Mappings that are not certain are searched for again after this long; each next time after twice as long, while the
#: channels stay the same. A search reads a list of thousands of lines, so it takes one part in so many of the time.
_AGAIN_NS, _SELDOM_NS, _ONE_PART_IN = 250 * NS_PER_MS, 4 * NS_PER_S, 20
#: Of a pod with more, nothing is counted: reading them all would take too long. That is eight programs.
_MOST_CHANNELS, _MOST_PROCESSES = 64, 8
#: Of more pods, those are counted that came first: a thread of each runs 250 times a second.
_MOST_PODS = 8
#: Of a pod whose thread is stuck, one run that ends and one that begins wait, and no more.
_MOST_RUNS = 2


def slots_of(table: ObjectTable, tsgs: Iterable[RmObject]) -> frozenset[Slot] | None:
    """Return the USERD of all channels of a pod's TSGs; None if it is unknown of one, or they are too many.

    It is unknown, too, where another pod's process made a client, or has the number of the one that did.
    """
    slots = set[Slot]()
    for tsg in tsgs:
        for channel in table.channels(tsg):
            client = table.clients[channel.client]
            maker, own = client.maker, table.processes.get(client.maker) == client.pod
            if channel.userd is None or not channel.userd.ring_size or not own or len(slots) == _MOST_CHANNELS:
                return None
            key = channel.client, channel.userd.memory
            known = table.objects.get(key)
            size = known.detail if known is not None and known.rm_class == abi.NV01_MEMORY_LOCAL_USER else 0
            started = table.started.get(maker, "")
            slots.add(Slot(maker, started, key, size, *channel.userd[1:], channel.context))
    return frozenset(slots) if len({slot.pid for slot in slots}) <= _MOST_PROCESSES else None


@dataclass(slots=True, eq=False)
class _Position:
    """What was last read of one channel."""

    memory: ProcessMemory
    base: int
    slot: Slot
    get: int
    read_ns: int
    moved_ns: int

    def is_moving(self, now_ns: int) -> bool:
        return now_ns - self.moved_ns < _MOVED_LATELY_NS


@dataclass(slots=True, eq=False)
class PodProgress:
    """Counts one pod's entries, in a thread of the pod's own: the pod can make each read as slow as it likes."""

    #: The channels to count, None to end.
    _wanted: frozenset[Slot] | None
    #: The numbers of the devices that may show USERD.
    _devices: frozenset[int]
    _device_at: MappedDevice = mapped_device
    _clock: Callable[[], int] = time.monotonic_ns
    _lock: threading.Lock = field(default_factory=threading.Lock)
    #: The channels that are searched for or counted.
    _known: frozenset[Slot] | None = None
    _positions: list[_Position] = field(default_factory=list)
    _memories: list[ProcessMemory] = field(default_factory=list)
    #: The entries since the last ``take``; whether that is all, and whether all channels are being counted.
    _entries: int = 0
    _whole: bool = False
    _found: bool = False
    _read_ns: int = 0
    _search_ns: int = 0
    _retry_ns: int = _AGAIN_NS
    #: When searches have rested long enough.
    _may_search_ns: int = 0

    def watch(self, slots: frozenset[Slot] | None) -> None:
        """Count these channels from now on; None ends the thread."""
        with self._lock:
            if slots != self._wanted:
                self._wanted, self._whole, self._found = slots, False, False

    def take(self) -> int | None:
        """Return how many entries were taken since the last call; None unless all channels were counted throughout."""
        with self._lock:
            counts = self._found and self._clock() - self._read_ns < _STUCK_NS
            entries = self._entries if self._whole and counts else None
            self._entries, self._whole = 0, counts
        return entries

    def run(self) -> None:
        """Count until ``watch`` ends it; the pod's thread runs this."""
        try:
            while self._wanted is not None:
                time.sleep(self.step() / NS_PER_S)
        finally:
            self._lose()

    def step(self) -> int:
        """Read what is due; return the ns until the next step."""
        if (wanted := self._wanted) is None:
            return 0
        now_ns = self._clock()
        if wanted is not self._known:
            self._lose()
            self._known, self._retry_ns = wanted, _AGAIN_NS
            self._search_ns = min(self._search_ns, now_ns + _AGAIN_NS)
        if not self._positions and now_ns >= max(self._search_ns, self._may_search_ns):
            began_ns = time.thread_time_ns()
            self._search(wanted)
            self._may_search_ns = now_ns + _ONE_PART_IN * (time.thread_time_ns() - began_ns)
        self._read()
        moving = any(position.is_moving(now_ns) for position in self._positions)
        return _MOVING_NS if moving else _RESTING_NS

    def _search(self, wanted: frozenset[Slot]) -> None:
        """Find where all channels stand, or try again later."""
        self._search_ns, self._retry_ns = self._clock() + self._retry_ns, min(2 * self._retry_ns, _SELDOM_NS)
        for pid, started in {(slot.pid, slot.started) for slot in wanted}:
            slots = [slot for slot in wanted if slot.pid == pid]
            with suppress(OSError):
                self._memories.append(memory := ProcessMemory(pid, started))
                for slot, base in userd_mapping.find(memory, slots, self._devices, self._device_at).items():
                    now_ns = self._clock()
                    if (indices := memory.indices(base, slot)) is not None:
                        self._positions.append(_Position(memory, base, slot, indices[0], now_ns, now_ns))
            if sum(position.slot.pid == pid for position in self._positions) < len(slots):  # it is not certain
                self._lose()
                return
        self._retry_ns = _AGAIN_NS
        with self._lock:
            self._found, self._read_ns = wanted is self._wanted, self._clock()

    def _read(self) -> None:
        """Read the channels that are due, and count what they advanced."""
        entries, sure = 0, True
        for position in self._positions:
            began_ns = self._clock()
            if not position.is_moving(began_ns) and began_ns - position.read_ns < _RESTING_NS:
                continue
            indices = position.memory.indices(position.base, position.slot)
            if indices is None:
                self._lose()
                return
            size = position.slot.ring_size
            advance = (indices[0] - position.get) % size
            if advance:
                sure = sure and (self._clock() - position.read_ns) * _FASTEST <= size * NS_PER_S
                position.moved_ns = began_ns
            entries += advance
            position.get, position.read_ns = indices[0], began_ns
        with self._lock:
            self._entries += entries
            self._whole = self._whole and sure
            self._read_ns = self._clock()

    def _lose(self) -> None:
        """Stop counting: a channel cannot be read, or others are wanted."""
        with self._lock:
            self._whole = self._found = False
        for memory in self._memories:
            memory.close()
        self._positions, self._memories = [], []


@dataclass(slots=True, eq=False)
class GpfifoProgress:
    """Counts the entries of all pods on one card. The main loop calls it."""

    device: RmDevice
    device_at: MappedDevice = mapped_device
    _pods: dict[str, PodProgress] = field(default_factory=dict)
    _threads: PodThreads = field(default_factory=lambda: PodThreads("qgpu-gpfifo"))

    def watch(self, slots: Mapping[str, frozenset[Slot] | None]) -> None:
        """Count these channels, by pod, and no others; None stands for channels that cannot be counted.

        It begins when several pods have channels: before, there is nobody to be compared with. It does not end when
        others have none for a while, or when there are more pods: they could make a pod's counts unknown at will.
        """
        known = {pod: channels for pod, channels in slots.items() if channels is not None}
        first = [pod for pod in known if pod in self._pods]
        new = [pod for pod in known if pod not in self._pods and len(slots) > 1]
        counted = {pod: known[pod] for pod in [*first, *new][:_MOST_PODS]}
        for pod in self._pods.keys() - counted.keys():
            self._pods.pop(pod).watch(None)
        for pod, channels in counted.items():
            if pod in self._pods:
                self._pods[pod].watch(channels)
            elif self._threads.waiting(pod) < _MOST_RUNS:
                minors = self.device.minor, abi.NV_CONTROL_MINOR
                devices = frozenset(os.makedev(abi.NV_MAJOR, minor) for minor in minors)
                self._pods[pod] = PodProgress(channels, devices, self.device_at)
                self._threads.do(pod, self._pods[pod].run)
        self._threads.retry()

    def take(self, pod: str) -> int | None:
        """Return how many entries the card took from a pod's channels since the last call; None if that is unknown."""
        return self._pods[pod].take() if pod in self._pods else None

    def forget(self, pod: str) -> None:
        """Forget a retired pod."""
        if (progress := self._pods.pop(pod, None)) is not None:
            progress.watch(None)
        self._threads.forget(pod)
