"""A recording: ticks fetched from the daemon over some time, sorted by pGPU and pod.

It has each pod's GPU time twice, as the ledger's totals and as the sum of recorded runs, so that the two can be
compared. Other modules present it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qgpu.errors import TimedOutError
from qgpu.ipc.control_socket import Client
from qgpu.model import NS_PER_S, Span
from qgpu.model.suspension import Residency

#: How often ticks are fetched; the daemon keeps half a minute of them.
_FETCH_S = 0.25
#: The first ticks to skip: the first was in progress when details were requested, the second began without them.
_BLIND_TICKS = 2
#: The mean utilization counts if it is known of more than this part of the recorded time.
_KNOWN_PART = 0.9
#: How much longer than requested a recording may take before it fails.
_GRACE_S = 15.0


@dataclass(slots=True)
class PodTrack:
    """The recording of one pod on one pGPU; times are ns on CLOCK_MONOTONIC."""

    pod: str
    pod_class: str
    cores: int | None
    runs: list[Span] = field(default_factory=list)
    closed: list[Span] = field(default_factory=list)
    #: (from, until, where it was): running, or off its cards, or on the way; each holds until a tick tells another.
    stays: list[tuple[int, int, str]] = field(default_factory=list)
    #: The ledger's GPU time of the samples whose runs are recorded.
    ledger_ns: int = 0

    @property
    def traced_ns(self) -> int:
        """Return the sum of the recorded runs."""
        return sum(end_ns - start_ns for start_ns, end_ns in self.runs)

    def take(self, pod: Mapping[str, Any]) -> None:
        """Add one tick's data about this pod."""
        self.ledger_ns += sum(tsg["run_ns"] for tsg in pod["tsgs"])
        _extend(self.runs, sorted((start_ns, end_ns) for tsg in pod["tsgs"] for start_ns, end_ns in tsg["runs"]))
        _extend(self.closed, ((start_ns, end_ns) for start_ns, end_ns in pod["closed"]))

    def stay(self, state: str, before_ns: int, now_ns: int) -> None:
        """Add where this pod is at one tick; the tick before was at ``before_ns``."""
        if self.stays and self.stays[-1][1] == before_ns:
            start_ns, _, last = self.stays[-1]
            self.stays[-1] = (start_ns, now_ns, last)
            if last == state:
                return
        self.stays.append((now_ns, now_ns, state))

    @property
    def suspended(self) -> bool:
        """Tell whether it was off its cards, or on the way, at any tick."""
        return any(state != Residency.RUNNING for _, _, state in self.stays)

    def spans(self, *states: Residency) -> list[Span]:
        """Return when it was in any of these states."""
        return [(start_ns, end_ns) for start_ns, end_ns, state in self.stays if state in states and end_ns > start_ns]

    @property
    def error(self) -> float:
        """Return the relative difference between the runs and the ledger's total; 0 if both are 0."""
        return abs(self.traced_ns - self.ledger_ns) / self.ledger_ns if self.ledger_ns else float(self.traced_ns > 0)


@dataclass(slots=True)
class GpuTrack:
    """The recording of one pGPU."""

    index: int
    name: str = ""
    policy: str = ""
    period_ns: int = 0
    pods: dict[str, PodTrack] = field(default_factory=dict)
    #: (when, the plan as it was sent to the plane), one for each change.
    plans: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    #: The ticks between which runs are recorded.
    first_ns: int = 0
    last_ns: int = 0
    #: Context switches that did not fit into the hardware's log, and ticks without their runs.
    lost: int = 0
    gaps: int = 0
    #: The time over which utilization is known, and that time weighted with it, in ns.
    _known_ns: int = 0
    _utilized_ns: float = 0.0
    _ticks: int = 0
    _lost_before: int = 0

    @property
    def span_ns(self) -> int:
        """Return the recorded time in ns."""
        return self.last_ns - self.first_ns

    @property
    def online_first(self) -> list[PodTrack]:
        """Return the pods by class, then by name."""
        return sorted(self.pods.values(), key=lambda pod: (pod.pod_class != "online", pod.pod))

    @property
    def utilization(self) -> float | None:
        """Return the part of the recorded time in which any kernel ran, 0 to 1; None if it is not known of most."""
        return self._utilized_ns / self._known_ns if self._known_ns > self.span_ns * _KNOWN_PART else None

    def add(self, tick: Mapping[str, Any]) -> None:
        """Add the next tick."""
        self._ticks += 1
        before_ns, now_ns = self.last_ns, tick["now_ns"]
        self.last_ns = now_ns
        if self._ticks <= _BLIND_TICKS:
            self.first_ns, self._lost_before = now_ns, tick["lost"]
        self.lost = tick["lost"] - self._lost_before
        if "plan" in tick:
            self.plans.append((now_ns, tick["plan"]))
        tsgs = [tsg for pod in tick["pods"] for tsg in pod["tsgs"]]
        whole = all(sum(end_ns - start_ns for start_ns, end_ns in tsg["runs"]) == tsg["run_ns"] for tsg in tsgs)
        recorded = self._ticks > _BLIND_TICKS
        self.gaps += recorded and not whole
        if recorded and (used := tick["utilization"]) is not None:
            self._known_ns += now_ns - before_ns
            self._utilized_ns += used * (now_ns - before_ns)
        for pod in tick["pods"]:
            track = self.pods.setdefault(pod["pod"], PodTrack(pod["pod"], pod["class"], pod["cores"]))
            track.pod_class, track.cores = pod["class"], pod["cores"]
            if self._ticks >= _BLIND_TICKS:
                track.stay(pod["state"], before_ns, now_ns)
            if recorded and whole:
                track.take(pod)


@dataclass(slots=True)
class Recording:
    """The recording of all pGPUs, and what was lost."""

    gpus: dict[int, GpuTrack] = field(default_factory=dict)
    #: Runs and closed gates dropped because they were fetched too late.
    dropped: int = 0

    @property
    def span_ns(self) -> int:
        """Return the time in ns that was recorded of every pGPU."""
        return min((gpu.span_ns for gpu in self.gpus.values()), default=0)

    @property
    def lost(self) -> int:
        """Return how many context switches did not fit into the hardware's log."""
        return sum(gpu.lost for gpu in self.gpus.values())

    @property
    def gaps(self) -> int:
        """Return how many ticks came without their runs."""
        return sum(gpu.gaps for gpu in self.gpus.values())

    @property
    def error(self) -> float:
        """Return the largest relative difference between a pod's runs and the ledger's total."""
        return max((pod.error for gpu in self.gpus.values() for pod in gpu.pods.values()), default=0.0)


def record(client: Client, seconds: float, gpu: int | None, stopped: Callable[[float], bool]) -> Recording:
    """Record one pGPU, or all, for ``seconds`` or until ``stopped(s)`` returns True, which waits for up to s seconds.

    Raises TimedOutError if a pGPU's loop does not tick.
    """
    client.call("trace.start", gpu=gpu)
    recording = Recording(
        {
            each["index"]: GpuTrack(each["index"], each["name"], each["policy"], each["period_ns"])
            for each in client.call("gpu.list")["gpus"]
            if gpu in (None, each["index"])
        }
    )
    deadline = time.monotonic() + seconds + _GRACE_S
    while recording.span_ns < seconds * NS_PER_S and not stopped(_FETCH_S):
        answer = client.call("trace.read")
        for tick in answer["ticks"]:
            recording.gpus[tick["gpu"]].add(tick)
        recording.dropped = answer["dropped"]
        if time.monotonic() > deadline:
            raise TimedOutError(f"only {recording.span_ns / NS_PER_S:.1f} s were recorded; see: qgpuctl status")
    return recording


def shares(runs: Sequence[Span], first_ns: int, last_ns: int, step_ns: int) -> Iterator[tuple[int, float]]:
    """Yield the start of each step and the pod's share of it, 0 to 1."""
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
    """Append spans in order. Join runs that only a sample boundary cut, and remove overlap if the clocks stepped."""
    for start_ns, end_ns in more:
        last_ns = spans[-1][1] if spans else 0
        if spans and start_ns <= last_ns:
            spans[-1] = (spans[-1][0], max(last_ns, end_ns))
        else:
            spans.append((start_ns, end_ns))
