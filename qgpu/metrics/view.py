"""The daemon's state at one moment, as exporters need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qgpu.metrics.tally import PodTally
from qgpu.model import Grant
from qgpu.model.container_labels import ContainerLabels
from qgpu.model.plane_api import Pgpu


@dataclass(frozen=True, slots=True)
class PodOnGpuView:
    """One pod on one pGPU."""

    pod: str
    grant: Grant
    used_ns: int = 0
    counted: PodTally = field(default_factory=PodTally)
    debt_ns: int = 0
    busy: bool = False
    memory: int = 0
    #: Its share of the last seconds, 0 to 1.
    share: float = 0.0
    labels: ContainerLabels = field(default_factory=ContainerLabels)
    #: How long switches to it and away from it took, in ns.
    switch_ns: int = 0
    #: Why it gets less than its quota; empty if it does not.
    below_quota: str = ""
    #: What sharing should add to its p99, in ns; None for offline pods and where it is unknown.
    expected_wait_p99_ns: int | None = None


@dataclass(frozen=True, slots=True)
class GpuView:
    """One pGPU with its pods."""

    pgpu: Pgpu
    policy: str
    online_policy: str
    period_ns: int
    ticks: int = 0
    plans: int = 0
    gated: bool = False
    problem: str = ""
    pods: Sequence[PodOnGpuView] = ()
    #: Processes on it that are in no pod; None where the driver does not tell.
    unmanaged: int | None = None
    #: What prepared grants hold of it, used or not: memory in bytes, quotas in per cent.
    memory_prepared: int = 0
    cores_prepared: int = 0
    #: NVML's utilization, 0 to 1; None: unknown.
    utilization: float | None = None
    #: How many times its memory may be granted, the bytes of pods that are off it because of that, and the bytes that
    #: are still to be made free for limits of pods that are on it.
    memory_overcommit: float = 1.0
    memory_yielded: int = 0
    memory_shortage: int = 0

    @property
    def engine_active(self) -> float:
        """Return in which part of the last seconds a pod was on the engine, 0 to 1."""
        return min(1.0, sum(pod.share for pod in self.pods))

    @property
    def memory_granted(self) -> int:
        """Add up the memory limits of all pods, in bytes."""
        return sum(pod.grant.memory or 0 for pod in self.pods)

    @property
    def memory_held(self) -> int:
        """Add up the memory that pods hold, in bytes."""
        return sum(pod.memory for pod in self.pods)

    @property
    def cores_granted(self) -> int:
        """Add up the quotas of all pods, in per cent."""
        return sum(pod.grant.cores or 0 for pod in self.pods)


@dataclass(frozen=True, slots=True)
class PodMoves:
    """Moves of a pod in one direction ("off" its cards, "back", or "between" cards), or those that failed."""

    direction: str
    count: int
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod on all of its pGPUs."""

    pod: str
    #: How many of its requests the plane refused so far; None if it does not count them.
    refused_memory: int | None = None
    refused_calls: int | None = None
    #: Whether it is off its cards, the bytes that lie in host memory meanwhile, and its moves so far.
    suspended: bool = False
    suspended_memory: int = 0
    #: Whether it waits for room in its cards' memory, to begin or to come back.
    waits_for_memory: bool = False
    moves: Sequence[PodMoves] = ()
    labels: ContainerLabels = field(default_factory=ContainerLabels)


@dataclass(frozen=True, slots=True)
class View:
    """The daemon's whole state at one moment."""

    version: str
    plane: str
    driver: str | None
    node: str
    uptime_s: float
    gpus: Sequence[GpuView] = ()
    pods: Mapping[str, PodView] = field(default_factory=dict)
    traces: int = 0
    #: Whether device files of pods are isolated; None on planes without such files.
    isolated: bool | None = None
    #: Refused uses of such files, by call.
    isolation_refused: Mapping[str, int] = field(default_factory=dict)
