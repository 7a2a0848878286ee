"""A simulated pGPU: its engine, its pods with their gates, and its event queue.

It decides only the order of events. The engine runs between events; events are the callbacks that loads, the gate
worker and the simulation's driver scheduled.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from qgpu.model import Grant, PodSample, Sample, Span, TsgSample
from qgpu.model.preemptions import preemptions
from qgpu.planes.sim.engine import Engine, Gate, Tsg
from qgpu.planes.sim.hardware import Hardware


@dataclass(slots=True, eq=False)
class SimPod(Gate):
    """A pod on one pGPU: its grant, its TSGs, and the history of its gate."""

    name: str = ""
    grant: Grant = field(default_factory=Grant)
    tsgs: list[Tsg] = field(default_factory=list)
    moved_ns: int = 0
    gated_ns: int = 0
    #: Spans in which the gate was closed, as far as no sample has reported them.
    closures: list[Span] = field(default_factory=list)
    #: Whether it ran nothing while its gate was last open; a real card shows no more than that.
    idle: bool = False
    opened_with_ns: int | None = None
    #: GPU time, switches and finished launches of TSGs that have ended, as far as no sample has reported them.
    ended_ns: int = 0
    ended_starts: int = 0
    ended_launches: int = 0

    def move(self, now_ns: int, to_open: bool) -> None:
        """Open or close the gate; record the closed time, and whether the pod ran while the gate was open."""
        run_ns = sum(tsg.run_ns for tsg in self.tsgs)
        if to_open:
            self.opened_with_ns = run_ns
        else:
            self.idle = run_ns == self.opened_with_ns
        if not self.open:
            self.gated_ns += now_ns - self.moved_ns
            self.closures.append((self.moved_ns, now_ns))
        self.open = to_open
        self.moved_ns = now_ns

    def closed_ns(self, now_ns: int) -> int:
        """Return how long the gate was closed since the pod came."""
        return self.gated_ns + (0 if self.open else now_ns - self.moved_ns)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the last sample reported of a TSG or pod, so that the next one reports only what is new."""

    run_ns: int = 0
    starts: int = 0
    launches: int = 0


class SimGpu:
    """One simulated pGPU. Every method except ``advance`` takes effect at ``now_ns``."""

    def __init__(self, index: int, hardware: Hardware, now_ns: int = 0) -> None:
        self.index = index
        self.hardware = hardware
        self.engine = Engine(hardware, now_ns)
        self.pods: dict[str, SimPod] = {}
        #: Counts changes that wake a waiting loop: pods, grants and TSGs that come, change or go.
        self.changes = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._event_count = 0
        self._owner: dict[Tsg, SimPod] = {}
        self._seen_tsgs: dict[Tsg, _Seen] = {}
        self._seen_gated: dict[SimPod, int] = {}
        self._tsg_count = 0
        self._sampled_ns = now_ns
        #: Times of recent samples, and the engine's idle time at each.
        self._idle: deque[tuple[int, int]] = deque([(now_ns, 0)])
        self._runs: dict[Tsg, list[Span]] = {}

    @property
    def now_ns(self) -> int:
        """Return the simulated time."""
        return self.engine.now_ns

    @property
    def detailed(self) -> bool:
        """Tell whether samples list when each TSG ran."""
        return self.engine.recorder is not None

    @detailed.setter
    def detailed(self, wanted: bool) -> None:
        if wanted != self.detailed:
            self._runs.clear()
            self.engine.recorder = self._ran if wanted else None

    def at(self, when_ns: int, call: Callable[[], None]) -> None:
        """Schedule ``call`` at ``when_ns``; calls at one time run in the order they were scheduled."""
        self._event_count += 1
        heapq.heappush(self._events, (max(when_ns, self.now_ns), self._event_count, call))

    def advance(self, until_ns: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Advance time to ``until_ns``, or until ``stop`` is true after all events of a moment."""
        while True:
            if self._events and self._events[0][0] <= self.now_ns:
                heapq.heappop(self._events)[2]()
            elif self.now_ns >= until_ns or stop():
                return
            else:
                horizon_ns = min(until_ns, self._events[0][0]) if self._events else until_ns
                self.engine.run(horizon_ns)

    def add_pod(self, name: str, grant: Grant) -> None:
        """Add a pod, or change its grant."""
        pod = self.pods.get(name)
        if pod is None:
            self.pods[name] = SimPod(name=name, grant=grant, moved_ns=self.now_ns)
        else:
            pod.grant = grant
        self.changes += 1

    def remove_pod(self, name: str) -> None:
        """Remove a pod; its TSGs run on, ungated and with the driver's timeslice."""
        pod = self.pods.pop(name)
        pod.move(self.now_ns, to_open=True)
        for tsg in pod.tsgs:
            tsg.timeslice_us = self.hardware.default_timeslice_us
            tsg.resting = False
        self._seen_gated.pop(pod, None)
        self.changes += 1

    def add_tsg(self, pod_name: str, finished: Callable[[int], None]) -> Tsg:
        """Add a process of a pod to the card."""
        pod = self.pods[pod_name]
        self._tsg_count += 1
        tsg = Tsg(f"{pod_name}/{self._tsg_count}", pod, self.hardware.default_timeslice_us, finished)
        pod.tsgs.append(tsg)
        self._owner[tsg] = pod
        self.engine.add(tsg)
        self.changes += 1
        return tsg

    def put_back(self, tsg: Tsg) -> None:
        """Bring a process back that ``remove_tsg`` took off the card."""
        pod = tsg.gate
        assert isinstance(pod, SimPod)
        pod.tsgs.append(tsg)
        self._owner[tsg] = pod
        self._seen_tsgs[tsg] = _Seen(tsg.run_ns, tsg.starts, tsg.launches)
        self.engine.add(tsg)
        self.changes += 1

    def remove_tsg(self, tsg: Tsg) -> None:
        """Remove a process that has ended, or leaves the card for a while; its queued work is dropped."""
        pod = self._owner.pop(tsg)
        self.engine.remove(tsg)
        pod.tsgs.remove(tsg)
        seen = self._seen_tsgs.pop(tsg, _Seen())
        pod.ended_ns += tsg.run_ns - seen.run_ns
        pod.ended_starts += tsg.starts - seen.starts
        pod.ended_launches += tsg.launches - seen.launches
        self.changes += 1

    def contended(self, pod: SimPod) -> bool:
        """Tell whether another pod also has work, which makes gate calls slower."""
        return any(tsg.left_ns and tsg.gate is not pod for tsg in self.engine.runlist)

    def sample(self) -> Sample:
        """Report what happened since the last sample: GPU time by TSG."""
        preempted, preempting = self._preemptions()
        pods = tuple(
            replace(self._sample_pod(pod), preempted=preempted[name], preempting=preempting[name])
            for name, pod in self.pods.items()
        )
        self._sampled_ns = self.now_ns
        self._runs.clear()
        return Sample(self.index, self.now_ns, pods, self._utilization())

    def _utilization(self) -> float | None:
        """Return the fraction of at least the last fifth of a second in which the engine ran kernels or switched."""
        idle_now_ns = self.engine.times.idle_ns
        self._idle.append((self.now_ns, idle_now_ns))
        while len(self._idle) > 2 and self._idle[1][0] <= self.now_ns - self.hardware.utilization_ns:
            self._idle.popleft()
        since_ns, idle_ns = self._idle[0]
        if self.now_ns == since_ns:
            return None
        return round(1 - (idle_now_ns - idle_ns) / (self.now_ns - since_ns), 2)  # whole per cent, as in NVML

    def _preemptions(self) -> tuple[Counter[str], Counter[str]]:
        """Count switches from offline pods to online pods since the last sample, by preempted and preempting pod."""
        handovers: Counter[tuple[str, str]] = Counter()
        for tsgs, count in self.engine.handovers.items():
            before, after = (self._owner.get(tsg) for tsg in tsgs)
            if before is not None and after is not None:
                handovers[before.name, after.name] += count
        self.engine.handovers.clear()
        return preemptions(handovers, {name: pod.grant.pod_class for name, pod in self.pods.items()})

    def _ran(self, tsg: Tsg, start_ns: int, end_ns: int) -> None:
        runs = self._runs.setdefault(tsg, [])
        if runs and runs[-1][1] == start_ns:
            runs[-1] = (runs[-1][0], end_ns)
        elif end_ns > start_ns:
            runs.append((start_ns, end_ns))

    def _sample_pod(self, pod: SimPod) -> PodSample:
        closed_ns = pod.closed_ns(self.now_ns)
        gated_ns = closed_ns - self._seen_gated.get(pod, 0)
        self._seen_gated[pod] = closed_ns
        closures = [*pod.closures, *([] if pod.open else [(pod.moved_ns, self.now_ns)])] if self.detailed else ()
        pod.closures.clear()
        closed = tuple((max(start, self._sampled_ns), end) for start, end in closures if end > self._sampled_ns)
        ended = pod.ended_ns, pod.ended_starts
        launches = pod.ended_launches + sum(
            tsg.launches - self._seen_tsgs.get(tsg, _Seen()).launches for tsg in pod.tsgs
        )
        pod.ended_ns = pod.ended_starts = pod.ended_launches = 0
        tsgs = tuple(self._sample_tsg(tsg) for tsg in pod.tsgs)
        return PodSample(pod.name, pod.grant, tsgs, gated_ns, closed, None, None, *ended, launches)

    def _sample_tsg(self, tsg: Tsg) -> TsgSample:
        seen = self._seen_tsgs.get(tsg, _Seen())
        self._seen_tsgs[tsg] = _Seen(tsg.run_ns, tsg.starts, tsg.launches)
        resident = self.engine.resident is tsg
        runs = tuple(self._runs.get(tsg, ()))
        longest_ns, tsg.longest_ns = tsg.longest_ns, 0
        return TsgSample(tsg.name, tsg.run_ns - seen.run_ns, tsg.starts - seen.starts, resident, runs, longest_ns)
