"""The experiments behind the measured figures, repeated on a simulated pGPU: no policy, no loop, fixed timeslices.

Each function sets up one experiment, runs it in simulated time and returns the result. Results are cached, because
several figures come from one experiment. ``a`` and ``b`` are throughputs relative to those of a pod alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from qgpu.load.workload import Workload
from qgpu.model import MIN_TIMESLICE_US, NS_PER_MS, NS_PER_S, NS_PER_US, Grant, Plan, PodClass, PodPlan, Window
from qgpu.planes.sim.gate_worker import GateWorker
from qgpu.planes.sim.gpu import SimGpu
from qgpu.planes.sim.hardware import H200
from qgpu.planes.sim.load import Load

#: A lone online request: 100 µs of work every 10 ms.
_ONLINE = Workload(kernel_us=100, batch=1, period_us=10_000, warmup_s=1)

#: ResNet-50 fp16 as (work, host gap) in µs per synchronisation. Measured alone: 4873, 8292 and 15575 µs a batch.
#: The gaps are fitted to those. A batch of 64 is launched so slowly that the card waits within it, here three times.
_BATCHES = {64: (1000.0, 184.0), 128: (7930.0, 328.0), 256: (15_211.0, 330.0)}

_PASSES_NS = 100 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Pair:
    """The throughputs of two pods, each relative to the pod alone."""

    a: float
    b: float

    @property
    def ratio(self) -> float:
        """Return the first pod's throughput over the second's."""
        return self.a / self.b

    @property
    def total(self) -> float:
        """Return the sum of both throughputs."""
        return self.a + self.b

    @property
    def part_b(self) -> float:
        """Return the second pod's part of the sum."""
        return self.b / self.total


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of two pods, as a context-switch trace shows them."""

    run_a_ms: float
    run_b_ms: float
    gap_us: float
    share_a: float
    share_b: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies of an online pod in µs, ascending, and the part of the card that offline pods kept."""

    sorted_us: tuple[float, ...]
    kept: float

    def figure(self, name: str) -> float:
        """Return ``p50``, ``p99``, ``max`` or ``kept``."""
        if name == "kept":
            return self.kept
        if name == "max":
            return self.sorted_us[-1]
        return self.sorted_us[int(len(self.sorted_us) * int(name[1:]) / 100)]


def flood(kernel_us: float) -> Workload:
    """Return a flood of kernels of this length."""
    return Workload(kernel_us=kernel_us, batch=0)


@cache
def pair(a_us: int, b_us: int, kernel_us: float) -> Pair:
    """Run two floods with these timeslices."""
    a, b = _run([flood(kernel_us)] * 2, [a_us, b_us])[1]
    return Pair(_useful(a), _useful(b))


@cache
def runs(a_us: int, b_us: int) -> Runs:
    """Run two floods and return their runs, as the context-switch event buffer would show them."""
    gpu, (a, b) = _run([flood(997)] * 2, [a_us, b_us])
    each = gpu.engine.switches / 2
    return Runs(
        a.run_ns / each / NS_PER_MS,
        b.run_ns / each / NS_PER_MS,
        gpu.engine.gap_ns / gpu.engine.switches / NS_PER_US,
        a.run_ns / _PASSES_NS,
        b.run_ns / _PASSES_NS,
    )


@cache
def windows(a_ms: float, b_ms: float, kernel_us: float, alone: bool = False) -> Pair:
    """Run two floods in turns by gate; with ``alone``, leave the second pod's turn idle.

    The measuring program closed gates before it opened others, as here with the shortest slices.
    """
    loads = [flood(kernel_us)] * (1 if alone else 2)
    got = [_useful(load) for load in _run(loads, [MIN_TIMESLICE_US] * 2, [a_ms, b_ms])[1]]
    return Pair(got[0], 0.0 if alone else got[1])


@cache
def online(online_us: int, offline_us: int, kernel_us: float, offline: int = 1, turn_ms: int = 0) -> Latency:
    """Run an online pod beside floods of offline pods, which take turns by gate if ``turn_ms`` is given."""
    loads = [_ONLINE] + [flood(kernel_us)] * offline
    turns = [0] + [turn_ms] * offline if turn_ms else None
    _, (front, *behind) = _run(loads, [online_us] + [offline_us] * offline, turns)
    return Latency(tuple(sorted(front.progress().latencies_us)), sum(map(_useful, behind)))


@cache
def online_alone() -> Latency:
    """Run an online pod on an empty card."""
    return Latency(tuple(sorted(_run([_ONLINE], [2048])[1][0].progress().latencies_us)), 0.0)


@cache
def crowd(pods: int, timeslice_us: int) -> tuple[float, ...]:
    """Run many floods with the same timeslice."""
    return tuple(map(_useful, _run([flood(997)] * pods, [timeslice_us] * pods)[1]))


@cache
def processes(one_us: int, each_us: int) -> Pair:
    """Run a pod with one flood beside a pod with two, with these timeslices for each process."""
    one, first, second = map(_useful, _run([flood(997)] * 3, [one_us, each_us, each_us])[1])
    return Pair(one, first + second)


@cache
def batches(size: int, how: str) -> Pair:
    """Run two pods of batch inference, by timeslices or windows at 2:1, or by the driver's default."""
    work_us, gap_us = _BATCHES[size]
    load = Workload(kernel_us=work_us, batch=1, gap_us=gap_us)
    alone = _useful(_run([load], [2048])[1][0])
    timeslices = {"20/10 ms": [20_000, 10_000], "8/4 ms": [8000, 4000]}.get(how, [2048, 2048])
    turns = [66.7, 33.3] if how.endswith("windows") else None
    a, b = _run([load, load], timeslices, turns)[1]
    return Pair(_useful(a) / alone, _useful(b) / alone)


def _run(
    workloads: Sequence[Workload], timeslices_us: Sequence[int], turns_ms: Sequence[float] | None = None
) -> tuple[SimGpu, list[Load]]:
    """Run one process a pod. With turns, one pod after the other has its gate open for that long (0: always)."""
    gpu = SimGpu(0, replace(H200, lease_ns=2 * _PASSES_NS))
    gates = GateWorker(gpu)
    names = [f"pod{i}" for i in range(len(workloads))]
    loads = []
    for name, workload in zip(names, workloads, strict=True):
        gpu.add_pod(name, Grant())
        loads.append(Load(gpu, name, workload, seed=name))
    if turns_ms is not None:
        gates.apply(_turns(names, turns_ms))
    for name, timeslice_us in zip(names, timeslices_us, strict=False):
        for tsg in gpu.pods[name].tsgs:
            tsg.timeslice_us = timeslice_us
    gpu.advance(_PASSES_NS)
    return gpu, loads


def _turns(names: Sequence[str], turns_ms: Sequence[float]) -> Plan:
    parts, at_ns = [], 0
    for i, turn_ms in enumerate(turns_ms):
        end_ns = at_ns + round(turn_ms * NS_PER_MS)
        if i < len(names):
            own = (Window(at_ns, end_ns),) if end_ns > at_ns else None
            parts.append(PodPlan(names[i], PodClass.OFFLINE, H200.default_timeslice_us, own))
        at_ns = end_ns
    return Plan(0, at_ns, tuple(parts))


def _useful(load: Load) -> float:
    return load.useful_ns / _PASSES_NS
