"""The sim plane: simulated pGPUs behind the same interface as real ones.

In virtual time, ``wait`` jumps ahead; tests and ``qgpuctl simulate`` use that. In real time, the simulated clock
follows CLOCK_MONOTONIC and is updated at every call; the daemon uses that without a GPU. The other files in
``qgpu.planes.sim`` model the pGPU. This file keeps pods, clocks and locks only.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum

from qgpu.errors import BackendGoneError, CheckpointError, RefusedError, UnknownNameError, no_pgpu, no_pod
from qgpu.linux import cgroup, proc
from qgpu.load.workload import Workload
from qgpu.model import NS_PER_S, Grant, Plan, Sample
from qgpu.model.plane_api import Host, MigInstance, Pgpu, PodInfo
from qgpu.planes.sim.checkpointer import SimCheckpointer
from qgpu.planes.sim.engine import EngineTimes
from qgpu.planes.sim.gate_worker import GateWorker
from qgpu.planes.sim.gpu import SimGpu
from qgpu.planes.sim.hardware import H200, Hardware
from qgpu.planes.sim.load import Load, Progress
from qgpu.planes.sim.pods_file import PodsFile
from qgpu.units import format_memory


class Clock(StrEnum):
    """The time base of a simulated host."""

    VIRTUAL = "virtual"
    REAL = "real"


@dataclass(slots=True)
class _Card:
    """One pGPU with its gate worker, and the change count when a loop last sampled it."""

    gpu: SimGpu
    gates: GateWorker
    seen_changes: int = -1


@dataclass(slots=True)
class _World:
    """What a host and its backends share: the cards, the clock, and the lock that guards them."""

    clock: Clock
    #: By the number of the pGPU.
    cards: dict[int, _Card]
    changed: threading.Condition = field(default_factory=threading.Condition)

    def catch_up(self, card: _Card) -> None:
        """Advance a card to the present; in virtual time it is always there."""
        if self.clock is Clock.REAL:
            card.gpu.advance(time.monotonic_ns())


class SimBackend:
    """Samples and plans for one simulated pGPU."""

    lost = 0

    def __init__(self, world: _World, card: _Card) -> None:
        self._world = world
        self._card = card
        self._closed = False
        card.seen_changes = -1

    @property
    def detailed(self) -> bool:
        """Tell whether samples list when each TSG ran."""
        return self._card.gpu.detailed

    @detailed.setter
    def detailed(self, wanted: bool) -> None:
        with self._world.changed:
            self._world.catch_up(self._card)
            self._card.gpu.detailed = wanted

    @property
    def now_ns(self) -> int:
        """Return the simulated time."""
        return self._card.gpu.now_ns

    def sample(self) -> Sample:
        """Report GPU time since the last call, including switches inside a TSG's runs."""
        with self._world.changed:
            self._check_open()
            self._world.catch_up(self._card)
            self._card.seen_changes = self._card.gpu.changes
            return self._card.gpu.sample()

    def apply(self, plan: Plan) -> None:
        """Install ``plan`` for one lease. Raises RefusedError for a plan of another pGPU."""
        with self._world.changed:
            self._check_open()
            self._world.catch_up(self._card)
            self._card.gates.apply(plan)

    def wait(self, timeout_ns: int) -> None:
        """Let time pass: at once in virtual time, with a sleep in real time."""
        with self._world.changed:
            self._check_open()
            if self._world.clock is Clock.REAL:
                self._world.changed.wait_for(self._changed, timeout_ns / NS_PER_S)
            else:
                self._card.gpu.advance(self._card.gpu.now_ns + timeout_ns, self._changed)

    def close(self) -> None:
        """Drop the plan: every gate open, every timeslice the driver's own. Safe to call twice."""
        with self._world.changed:
            if self._closed:
                return
            self._closed = True
            self._world.catch_up(self._card)
            self._card.gates.drop_plan()
            self._world.changed.notify_all()

    def _changed(self) -> bool:
        return self._closed or self._card.gpu.changes != self._card.seen_changes

    def _check_open(self) -> None:
        if self._closed:
            raise BackendGoneError(f"pGPU {self._card.gpu.index}: this backend is closed")


class SimHost(Host):
    """Simulated pGPUs and their pods, with loads in place of processes."""

    plane = "sim"

    def __init__(
        self,
        gpus: int = 1,
        clock: Clock = Clock.VIRTUAL,
        hardware: Hardware = H200,
        pods_file: PodsFile | None = None,
        mig: int = 0,
    ) -> None:
        """Make pGPUs, with the containers that are kept for them; with ``mig``, so many instances of each card."""
        now_ns = time.monotonic_ns() if clock is Clock.REAL else 0
        self._pgpus = [each for card in range(gpus) for each in _pgpus_of(card, hardware, mig)]
        self._world = _World(clock, {})
        for pgpu in self._pgpus:
            gpu = SimGpu(pgpu.index, replace(hardware, name=pgpu.name, memory=pgpu.memory), now_ns)
            self._world.cards[pgpu.index] = _Card(gpu, GateWorker(gpu))
        self._pods: dict[str, PodInfo] = {}
        #: Start times of attached processes by pod, because a pid may be reused.
        self._started: dict[str, dict[int, str]] = {}
        self._loads: dict[int, tuple[_Card, Load]] = {}
        self._load_count = 0
        self._pods_file = pods_file
        with self._world.changed:
            for pod in pods_file.read() if pods_file is not None else ():
                if pod.grants.keys() <= self._world.cards.keys():
                    self._grant(pod.name, pod.grants)
                    self._pods[pod.name] = pod

    def pgpus(self) -> Sequence[Pgpu]:
        """List the simulated pGPUs."""
        return self._pgpus

    def backend(self, pgpu: int) -> SimBackend:
        """Open the backend of one pGPU. Raises UnknownNameError."""
        return SimBackend(self._world, self._card(pgpu))

    def pods(self) -> Sequence[PodInfo]:
        """List the pods, each with its running processes."""
        with self._world.changed:
            inside = {name: self._inside(pod) for name, pod in self._pods.items()}
            held: dict[str, dict[int, int]] = {name: {} for name in self._pods}
            for card, load in self._loads.values():
                if load.memory and load.pod in held:
                    of_pod = held[load.pod]
                    of_pod[card.gpu.index] = of_pod.get(card.gpu.index, 0) + load.memory
            return [
                replace(pod, pids=inside[name].pids, memory=held[name], alive=inside[name].alive)
                for name, pod in self._pods.items()
            ]

    def admit(self, name: str, grants: Mapping[int, Grant], at: str = "") -> None:
        """Add a pod. Raises RefusedError if the name is taken, UnknownNameError for an unknown pGPU."""
        with self._world.changed:
            if name in self._pods:
                raise RefusedError(f"pod {name}: there is one of that name already")
            self._grant(name, grants)
            self._pods[name] = PodInfo(name, dict(grants), cgroup=at)
            self._keep(at)

    def amend(self, name: str, grants: Mapping[int, Grant]) -> None:
        """Change a pod's grants.

        Raises UnknownNameError, or RefusedError if the pod works on a pGPU that it would lose.
        """
        with self._world.changed:
            pod = self._pod(name)
            for gone in set(pod.grants) - set(grants):
                if self._card(gone).gpu.pods[name].tsgs:
                    raise RefusedError(f"pod {name}: it runs on pGPU {gone}; stop its work there first")
            self._grant(name, grants)
            for gone in set(pod.grants) - set(grants):
                self._card(gone).gpu.remove_pod(name)
            self._pods[name] = replace(pod, grants=dict(grants))
            self._keep(pod.cgroup)

    def attach(self, name: str, pid: int, fds: Sequence[int]) -> None:
        """Count a process as the pod's; ``start_load`` starts its work on the card."""
        for fd in fds:
            os.close(fd)
        with self._world.changed:
            pod = self._pod(name)
            if pod.cgroup:
                cgroup.ensure_in(name, pid, pod.cgroup, pod.joined)
                return
            self._started[name] = {pid: _start_of(pid) or "" for pid in (*self._inside(pod).pids, pid)}

    def join(self, name: str, cgroups: Sequence[str]) -> None:
        """Let exactly these containers' cgroups count to a pod besides its own. Raises UnknownNameError."""
        with self._world.changed:
            self._pods[name] = pod = replace(self._pod(name), joined=tuple(cgroups))
            self._keep(pod.cgroup)

    def retire(self, name: str) -> None:
        """Remove a pod, if it is there; its remaining loads run on ungated."""
        with self._world.changed:
            if name not in self._pods:
                return
            for pgpu in self._pod(name).grants:
                card = self._card(pgpu)
                self._world.catch_up(card)
                card.gpu.remove_pod(name)
            at = self._pods.pop(name).cgroup
            self._started.pop(name, None)
            self._keep(at)
            self._world.changed.notify_all()

    def close(self) -> None:
        """Release all pGPUs: remaining loads run on ungated."""
        with self._world.changed:
            for card in self._world.cards.values():
                self._world.catch_up(card)
                card.gates.drop_plan()

    def start_load(self, pod: str, pgpu: int, workload: Workload) -> int:
        """Start a process of ``pod`` that runs ``workload``, and return its number.

        Raises UnknownNameError for an unknown pod or pGPU, RefusedError if the pod has no grant or no memory there.
        """
        with self._world.changed:
            info, card = self._pod(pod), self._card(pgpu)
            if pgpu not in info.grants:
                raise RefusedError(f"pod {pod}: it was granted nothing on pGPU {pgpu}")
            self._check_memory(card, info, workload.memory)
            self._world.catch_up(card)
            self._load_count += 1
            load = Load(card.gpu, pod, workload, seed=f"{pod}/{self._load_count}")
            card.gates.refresh()
            self._loads[self._load_count] = (card, load)
            self._world.changed.notify_all()
            return self._load_count

    def progress(self, load: int) -> Progress:
        """Report what a load did. Raises UnknownNameError."""
        with self._world.changed:
            card, running = self._load(load)
            self._world.catch_up(card)
            return running.progress()

    def stop_load(self, load: int) -> None:
        """End a load's process and remove it. Raises UnknownNameError."""
        with self._world.changed:
            card, running = self._load(load)
            self._world.catch_up(card)
            running.stop()
            del self._loads[load]
            self._world.changed.notify_all()

    def times(self, pgpu: int) -> EngineTimes:
        """Return where a pGPU's time went: useful work, switching, idle. Raises UnknownNameError."""
        with self._world.changed:
            card = self._card(pgpu)
            self._world.catch_up(card)
            return card.gpu.engine.times

    def checkpointer(self) -> SimCheckpointer:
        """Return what takes loads off the card."""
        return SimCheckpointer(self)

    def loads_of(self, pod: str) -> list[int]:
        """List the loads of a pod that have not ended."""
        with self._world.changed:
            return [number for number, (_, load) in self._loads.items() if load.pod == pod and not load.done]

    def free_memory(self, pgpu: int) -> int:
        """Return how many bytes of a pGPU no load holds. Raises UnknownNameError."""
        with self._world.changed:
            return self._card(pgpu).gpu.hardware.memory - self._held(self._card(pgpu))

    @contextmanager
    def at_load(self, number: int) -> Iterator[Load]:
        """Give a load in the present, for what changes it. Raises UnknownNameError."""
        with self._world.changed:
            card, load = self._load(number)
            self._world.catch_up(card)
            yield load
            card.gates.refresh()
            self._world.changed.notify_all()

    def move_load(self, number: int, moves: Mapping[str, str]) -> None:
        """Let a load that is off its card come back on another, by UUIDs. Raises CheckpointError, UnknownNameError."""
        uuids = {pgpu.index: pgpu.uuid for pgpu in self._pgpus}
        with self._world.changed:
            card, load = self._load(number)
            wanted = moves.get(uuids[card.gpu.index], uuids[card.gpu.index])
            target = self._card(next(index for index, uuid in uuids.items() if uuid == wanted))
            if load.pod not in target.gpu.pods:
                raise CheckpointError(f"pod {load.pod}: it has no grant on pGPU {target.gpu.index}")
            self._world.catch_up(target)
            load.move(target.gpu)
            self._loads[number] = (target, load)

    def pass_time(self, duration_ns: int) -> None:
        """Let an operation of the host take its time; none in virtual time, which only ``wait`` advances."""
        if self._world.clock is Clock.REAL:
            time.sleep(duration_ns / NS_PER_S)

    def call_at(self, pgpu: int, when_ns: int, call: Callable[[], None]) -> None:
        """Schedule ``call`` at a time on a pGPU's clock, for scenarios."""
        self._card(pgpu).gpu.at(when_ns, call)

    def _keep(self, at: str) -> None:
        """Keep the pods for the next daemon, if the pod that has changed has a cgroup."""
        if self._pods_file is not None and at:
            self._pods_file.write(self._pods.values())

    def _grant(self, name: str, grants: Mapping[int, Grant]) -> None:
        cards = [(self._card(pgpu), grant) for pgpu, grant in grants.items()]
        for card, grant in cards:
            self._world.catch_up(card)
            card.gpu.add_pod(name, grant)
            card.gates.refresh()
        self._world.changed.notify_all()

    def _held(self, card: _Card, pod: str | None = None) -> int:
        """Add up what the loads of a card hold, or those of one pod."""
        return sum(load.memory for at, load in self._loads.values() if at is card and pod in (None, load.pod))

    def _check_memory(self, card: _Card, pod: PodInfo, size: int) -> None:
        index, limit, more = card.gpu.index, pod.grants[card.gpu.index].memory, f"{format_memory(size)} more do not fit"
        if size and limit is not None and self._held(card, pod.name) + size > limit:
            raise RefusedError(f"pod {pod.name}: memory limit of {format_memory(limit)} on pGPU {index}: {more}")
        if size and self._held(card) + size > card.gpu.hardware.memory:
            raise RefusedError(f"pod {pod.name}: pGPU {index} is out of memory: {more}")

    def _card(self, pgpu: int) -> _Card:
        if pgpu not in self._world.cards:
            raise no_pgpu(pgpu, self._world.cards)
        return self._world.cards[pgpu]

    def _pod(self, name: str) -> PodInfo:
        if name not in self._pods:
            raise no_pod(name)
        return self._pods[name]

    def _inside(self, pod: PodInfo) -> cgroup.CgroupMembers:
        """List a pod's running processes: those attached, or those of its cgroup."""
        started = self._started.get(pod.name, {}).items() if not pod.cgroup else ()
        attached = tuple(pid for pid, start in started if start and _start_of(pid) in (start, None))
        found = cgroup.members(*pod.cgroups)
        return cgroup.CgroupMembers(tuple(dict.fromkeys((*attached, *found.pids))), found.alive)

    def _load(self, number: int) -> tuple[_Card, Load]:
        if number not in self._loads:
            raise UnknownNameError(f"load {number}: there is none of that number")
        return self._loads[number]


def _pgpus_of(card: int, hardware: Hardware, mig: int) -> list[Pgpu]:
    """Return a simulated card, or so many MIG instances of it, which divide its memory."""
    if not mig:
        return [Pgpu(card, f"GPU-51300000-0000-0000-0000-{card:012d}", hardware.name, hardware.memory)]
    instances = [MigInstance(card, number) for number in range(1, mig + 1)]
    name, memory = f"{hardware.name} MIG 1/{mig}", hardware.memory // mig
    return [
        Pgpu(each.index, f"MIG-51300000-0000-0000-0000-{each.index:012d}", name, memory, mig=each) for each in instances
    ]


def _start_of(pid: int) -> str | None:
    """Return a process's start time in clock ticks; empty if it has ended, None if it cannot be read."""
    try:
        return proc.start_time(pid)
    except OSError:
        return None
