"""The sim plane: simulated pGPUs behind the same seam as real ones.

In virtual time ``wait`` jumps; that is what tests and ``qgpuctl simulate`` use. In real time the simulated
clock follows CLOCK_MONOTONIC and is brought up to date at every call; that is what the daemon uses where
there is no GPU. What a pGPU does is decided by ``qgpu.planes.sim``; this file only keeps pods, clocks and locks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from qgpu.errors import BackendGoneError, RefusedError, UnknownNameError, no_pgpu, no_pod
from qgpu.linux import cgroup, proc
from qgpu.load.spec import Workload
from qgpu.model import NS_PER_S, Grant, Plan, Sample
from qgpu.model.plane_api import Pgpu, PodInfo
from qgpu.planes.sim.engine import EngineTimes
from qgpu.planes.sim.gate_worker import GateWorker
from qgpu.planes.sim.gpu import SimGpu
from qgpu.planes.sim.hardware import H200, Hardware
from qgpu.planes.sim.load import Load, Progress

#: Where /proc/PID/stat says when a process started, of the fields behind its name.
_STARTED = 19


class Clock(StrEnum):
    """Which time a simulated host lives in."""

    VIRTUAL = "virtual"
    REAL = "real"


@dataclass(slots=True)
class _Card:
    """One pGPU with its gate worker, and what changed on it when a loop last looked."""

    gpu: SimGpu
    gates: GateWorker
    seen_changes: int = -1


@dataclass(slots=True)
class _World:
    """What a host and its backends share: the cards, the clock, and the lock that guards all of it."""

    clock: Clock
    cards: list[_Card]
    changed: threading.Condition = field(default_factory=threading.Condition)

    def catch_up(self, card: _Card) -> None:
        """Bring a card to the present; in virtual time it is there already."""
        if self.clock is Clock.REAL:
            card.gpu.advance(time.monotonic_ns())


class SimBackend:
    """Time on one simulated pGPU."""

    lost = 0

    def __init__(self, world: _World, card: _Card) -> None:
        self._world = world
        self._card = card
        self._closed = False
        card.seen_changes = -1

    @property
    def detailed(self) -> bool:
        """Tell whether samples say from when to when."""
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
        """Report true time on the engine since the last call, switches inside a TSG's runs included."""
        with self._world.changed:
            self._check_open()
            self._world.catch_up(self._card)
            self._card.seen_changes = self._card.gpu.changes
            return self._card.gpu.sample()

    def apply(self, plan: Plan) -> None:
        """Take ``plan`` for one lease. Raises RefusedError for a plan of another pGPU."""
        with self._world.changed:
            self._check_open()
            self._world.catch_up(self._card)
            self._card.gates.apply(plan)

    def wait(self, timeout_ns: int) -> None:
        """Let time pass: at once in virtual time, asleep in real time."""
        with self._world.changed:
            self._check_open()
            if self._world.clock is Clock.REAL:
                self._world.changed.wait_for(self._changed, timeout_ns / NS_PER_S)
            else:
                self._card.gpu.advance(self._card.gpu.now_ns + timeout_ns, self._changed)

    def close(self) -> None:
        """Give up the plan: every gate open, every timeslice the driver's own. Safe to call twice."""
        with self._world.changed:
            if self._closed:
                return
            self._closed = True
            self._world.catch_up(self._card)
            self._card.gates.give_up()
            self._world.changed.notify_all()

    def _changed(self) -> bool:
        return self._closed or self._card.gpu.changes != self._card.seen_changes

    def _check_open(self) -> None:
        if self._closed:
            raise BackendGoneError(f"pGPU {self._card.gpu.index}: this backend is closed")


class SimHost:
    """Simulated pGPUs and the pods on them, with loads in place of processes."""

    plane = "sim"

    def __init__(self, gpus: int = 1, clock: Clock = Clock.VIRTUAL, hardware: Hardware = H200) -> None:
        now_ns = time.monotonic_ns() if clock is Clock.REAL else 0
        cards = []
        for index in range(gpus):
            gpu = SimGpu(index, hardware, now_ns)
            cards.append(_Card(gpu, GateWorker(gpu)))
        self._world = _World(clock, cards)
        self._hardware = hardware
        self._pods: dict[str, PodInfo] = {}
        #: When processes that were attached had started, by pod: a number alone may come to name another one.
        self._started: dict[str, dict[int, str]] = {}
        self._loads: dict[int, tuple[_Card, Load]] = {}
        self._load_count = 0

    def pgpus(self) -> Sequence[Pgpu]:
        """List the simulated pGPUs."""
        return [
            Pgpu(
                card.gpu.index,
                f"GPU-51300000-0000-0000-0000-{card.gpu.index:012d}",
                self._hardware.name,
                self._hardware.memory,
            )
            for card in self._world.cards
        ]

    def backend(self, pgpu: int) -> SimBackend:
        """Open the backend of one pGPU. Raises UnknownNameError."""
        return SimBackend(self._world, self._card(pgpu))

    def pods(self) -> Sequence[PodInfo]:
        """List the pods, each with those of its processes that live."""
        with self._world.changed:
            inside = {name: self._inside(pod) for name, pod in self._pods.items()}
            return [replace(pod, pids=inside[name].pids, alive=inside[name].alive) for name, pod in self._pods.items()]

    def admit(self, name: str, grants: Mapping[int, Grant], at: str = "") -> None:
        """Make a pod known. Raises RefusedError if there is one of that name, UnknownNameError for a wrong pGPU."""
        with self._world.changed:
            if name in self._pods:
                raise RefusedError(f"pod {name}: there is one of that name already")
            self._grant(name, grants)
            self._pods[name] = PodInfo(name, dict(grants), cgroup=at)

    def amend(self, name: str, grants: Mapping[int, Grant]) -> None:
        """Change a pod's grants. Raises UnknownNameError; RefusedError to take a pGPU from under running work."""
        with self._world.changed:
            pod = self._pod(name)
            for gone in set(pod.grants) - set(grants):
                if self._card(gone).gpu.pods[name].tsgs:
                    raise RefusedError(f"pod {name}: it runs on pGPU {gone}; stop its work there first")
            self._grant(name, grants)
            for gone in set(pod.grants) - set(grants):
                self._card(gone).gpu.remove_pod(name)
            self._pods[name] = replace(pod, grants=dict(grants))

    def attach(self, name: str, pid: int, fds: Sequence[int]) -> None:
        """Count a process as the pod's; what it does on the card comes by ``start_load``."""
        for fd in fds:
            os.close(fd)
        with self._world.changed:
            pod = self._pod(name)
            self._started[name] = {pid: _start_of(pid) or "" for pid in (*self._inside(pod).pids, pid)}

    def left_behind(self) -> Mapping[int, int]:
        """Return nothing: a pod's memory ends with it here."""
        return {}

    def retire(self, name: str) -> None:
        """Forget a pod; loads of it that are left run on ungated. Raises UnknownNameError."""
        with self._world.changed:
            for pgpu in self._pod(name).grants:
                card = self._card(pgpu)
                self._world.catch_up(card)
                card.gpu.remove_pod(name)
            del self._pods[name]
            self._started.pop(name, None)
            self._world.changed.notify_all()

    def close(self) -> None:
        """Let go of all pGPUs: loads that are left run on ungated."""
        with self._world.changed:
            for card in self._world.cards:
                self._world.catch_up(card)
                card.gates.give_up()

    def start_load(self, pod: str, pgpu: int, workload: Workload) -> int:
        """Start a process of ``pod`` that does ``workload``, and return its number.

        Raises UnknownNameError for a pod or pGPU there is not, RefusedError where the pod has no grant.
        """
        with self._world.changed:
            info, card = self._pod(pod), self._card(pgpu)
            if pgpu not in info.grants:
                raise RefusedError(f"pod {pod}: it was granted nothing on pGPU {pgpu}")
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
        """End a load's process and forget it. Raises UnknownNameError."""
        with self._world.changed:
            card, running = self._load(load)
            self._world.catch_up(card)
            running.stop()
            del self._loads[load]
            self._world.changed.notify_all()

    def times(self, pgpu: int) -> EngineTimes:
        """Say where a pGPU's time went: useful work, switching, idle. Raises UnknownNameError."""
        with self._world.changed:
            card = self._card(pgpu)
            self._world.catch_up(card)
            return card.gpu.engine.times

    def call_at(self, pgpu: int, when_ns: int, call: Callable[[], None]) -> None:
        """Have ``call`` called when a pGPU's clock reaches ``when_ns``: how scenarios make things happen."""
        self._card(pgpu).gpu.at(when_ns, call)

    def _grant(self, name: str, grants: Mapping[int, Grant]) -> None:
        cards = [(self._card(pgpu), grant) for pgpu, grant in grants.items()]
        for card, grant in cards:
            self._world.catch_up(card)
            card.gpu.add_pod(name, grant)
            card.gates.refresh()
        self._world.changed.notify_all()

    def _card(self, pgpu: int) -> _Card:
        if not 0 <= pgpu < len(self._world.cards):
            raise no_pgpu(pgpu, range(len(self._world.cards)))
        return self._world.cards[pgpu]

    def _pod(self, name: str) -> PodInfo:
        if name not in self._pods:
            raise no_pod(name)
        return self._pods[name]

    def _inside(self, pod: PodInfo) -> cgroup.CgroupMembers:
        """List a pod's processes that live: those attached, or those of its cgroup."""
        if pod.cgroup:
            return cgroup.inside(pod.cgroup)
        started = self._started.get(pod.name, {}).items()
        return cgroup.CgroupMembers(tuple(pid for pid, start in started if start and _start_of(pid) in (start, None)))

    def _load(self, number: int) -> tuple[_Card, Load]:
        if number not in self._loads:
            raise UnknownNameError(f"load {number}: there is none of that number")
        return self._loads[number]


def _start_of(pid: int) -> str | None:
    """Return when a process started, in the kernel's terms; nothing of one that has ended, None if we cannot look."""
    try:
        fields = proc.stat(pid)
    except OSError:
        return None
    return fields[_STARTED] if fields and fields[0] not in "ZX" else ""
