"""A recording: ticks fetched from the daemon over a span of time, put in order by pGPU and pod.

What each pod got is told twice, by the ledger's totals and by the runs that were recorded; the two are kept
apart so that they can be held against each other. How it is shown is left to others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qgpu.errors import TimedOutError
from qgpu.ipc.control_socket import Client
from qgpu.model import NS_PER_S, Span

#: How often waiting ticks are fetched; the daemon keeps half a minute of them.
_FETCH_S = 0.25
#: The first tick was under way when details were asked for, and the second began without them.
_BLIND_TICKS = 2
#: How much longer than asked a recording may take before something must be wrong.
_PATIENCE_S = 15.0


@dataclass(slots=True)
class PodTrack:
    """What was recorded of one pod on one pGPU; times are ns on CLOCK_MONOTONIC."""

    pod: str
    pod_class: str
    cores: int | None
    runs: list[Span] = field(default_factory=list)
    closed: list[Span] = field(default_factory=list)
    starts: int = 0
    #: (when, GPU time of the ledger so far, tick by tick)
    used: list[tuple[int, int]] = field(default_factory=list)
    #: GPU time of the samples whose runs are recorded, by the ledger's count.
    ledger_ns: int = 0

    @property
    def traced_ns(self) -> int:
        """Return the GPU time that the recorded runs add up to."""
        return sum(end_ns - start_ns for start_ns, end_ns in self.runs)

    def take(self, pod: Mapping[str, Any]) -> None:
        """Take what one tick tells of this pod."""
        self.ledger_ns += sum(tsg["run_ns"] for tsg in pod["tsgs"])
        self.starts += sum(tsg["starts"] for tsg in pod["tsgs"])
        _extend(self.runs, sorted((start_ns, end_ns) for tsg in pod["tsgs"] for start_ns, end_ns in tsg["runs"]))
        _extend(self.closed, ((start_ns, end_ns) for start_ns, end_ns in pod["closed"]))

    @property
    def error(self) -> float:
        """Return by which part of the ledger's total the runs miss it; 0 where both are nothing."""
        return abs(self.traced_ns - self.ledger_ns) / self.ledger_ns if self.ledger_ns else float(self.traced_ns > 0)


@dataclass(slots=True)
class GpuTrack:
    """What was recorded of one pGPU."""

    index: int
    name: str = ""
    policy: str = ""
    period_ns: int = 0
    pods: dict[str, PodTrack] = field(default_factory=dict)
    #: (when, the plan as it was sent to the plane), where it changed.
    plans: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    #: Between which ticks runs are recorded, both ends sampled.
    first_ns: int = 0
    last_ns: int = 0
    #: Context switches that the hardware had no room for, and ticks whose runs were not told.
    lost: int = 0
    gaps: int = 0
    _ticks: int = 0
    _lost_before: int = 0

    @property
    def span_ns(self) -> int:
        """Return how long was recorded."""
        return self.last_ns - self.first_ns

    def add(self, tick: Mapping[str, Any]) -> None:
        """Take the next tick."""
        self._ticks += 1
        now_ns = self.last_ns = tick["now_ns"]
        if self._ticks <= _BLIND_TICKS:
            self.first_ns, self._lost_before = now_ns, tick["lost"]
        self.lost = tick["lost"] - self._lost_before
        if "plan" in tick:
            self.plans.append((now_ns, tick["plan"]))
        tsgs = [tsg for pod in tick["pods"] for tsg in pod["tsgs"]]
        whole = all(sum(end_ns - start_ns for start_ns, end_ns in tsg["runs"]) == tsg["run_ns"] for tsg in tsgs)
        recorded = self._ticks > _BLIND_TICKS
        self.gaps += recorded and not whole
        for pod in tick["pods"]:
            track = self.pods.setdefault(pod["pod"], PodTrack(pod["pod"], pod["class"], pod["cores"]))
            track.pod_class, track.cores = pod["class"], pod["cores"]
            track.used.append((now_ns, pod["used_ns"]))
            if recorded and whole:
                track.take(pod)


@dataclass(slots=True)
class Recording:
    """What was recorded of all pGPUs, and how it went."""

    gpus: dict[int, GpuTrack] = field(default_factory=dict)
    #: Runs and closed gates that were dropped because they were fetched too late.
    dropped: int = 0

    @property
    def span_ns(self) -> int:
        """Return how long was recorded of every pGPU."""
        return min((gpu.span_ns for gpu in self.gpus.values()), default=0)

    @property
    def lost(self) -> int:
        """Count the context switches that the hardware had no room for."""
        return sum(gpu.lost for gpu in self.gpus.values())

    @property
    def gaps(self) -> int:
        """Count the ticks whose runs were not told."""
        return sum(gpu.gaps for gpu in self.gpus.values())

    @property
    def error(self) -> float:
        """Return the largest part by which a pod's runs miss the ledger's total."""
        return max((pod.error for gpu in self.gpus.values() for pod in gpu.pods.values()), default=0.0)


def record(client: Client, seconds: float, gpu: int | None, stopped: Callable[[float], bool]) -> Recording:
    """Record one pGPU, or all, for so many seconds, or until ``stopped`` (which waits) says so.

    Raises TimedOutError where a pGPU's loop does not tick.
    """
    client.call("trace.start", gpu=gpu)
    recording = Recording(
        {
            each["index"]: GpuTrack(each["index"], each["name"], each["policy"], each["period_ns"])
            for each in client.call("gpu.list")["gpus"]
            if gpu in (None, each["index"])
        }
    )
    deadline = time.monotonic() + seconds + _PATIENCE_S
    while recording.span_ns < seconds * NS_PER_S and not stopped(_FETCH_S):
        answer = client.call("trace.read")
        for tick in answer["ticks"]:
            recording.gpus[tick["gpu"]].add(tick)
        recording.dropped = answer["dropped"]
        if time.monotonic() > deadline:
            raise TimedOutError(f"only {recording.span_ns / NS_PER_S:.1f} s were recorded; see: qgpuctl status")
    return recording


def shares(runs: Sequence[Span], first_ns: int, last_ns: int, step_ns: int) -> Iterator[tuple[int, float]]:
    """Yield a pod's share of each stretch of time, 0 to 1, and when the stretch began."""
    at = 0
    for start_ns in range(first_ns, last_ns, step_ns):
        end_ns = min(last_ns, start_ns + step_ns)
        while at < len(runs) and runs[at][1] <= start_ns:
            at += 1
        ran_ns, now = 0, at
        while now < len(runs) and runs[now][0] < end_ns:
            ran_ns += min(runs[now][1], end_ns) - max(runs[now][0], start_ns)
            now += 1
        yield start_ns, ran_ns / (end_ns - start_ns)


def _extend(spans: list[Span], more: Iterable[Span]) -> None:
    """Append spans in order, joining what only a sample has cut, and without overlap should two clocks have stepped."""
    for start_ns, end_ns in more:
        last_ns = spans[-1][1] if spans else 0
        if spans and start_ns <= last_ns:
            spans[-1] = (spans[-1][0], max(last_ns, end_ns))
        else:
            spans.append((start_ns, end_ns))
