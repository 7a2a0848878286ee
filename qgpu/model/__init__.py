"""The values that qgpu computes with: pods, grants, samples, snapshots, plans.

Every value is frozen and checks itself when it is made: InvalidValueError names what is wrong. Nothing here reads a
clock, touches a device, or imports any other part of qgpu except its errors. Time is integer nanoseconds; microseconds
appear only where a number is RM's own (``timeslice_us``).
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from qgpu.errors import InvalidValueError

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

#: Timeslices a plan may ask for, in µs. Below 50 µs a TSG makes no progress beside a busy neighbour.
MIN_TIMESLICE_US = 50
MAX_TIMESLICE_US = 1_000_000

#: Scheduling periods a pGPU may have. A gate costs about 1 ms a turn, which would take most of a shorter period.
MIN_PERIOD_NS = 10 * NS_PER_MS
MAX_PERIOD_NS = 10 * NS_PER_S

#: The shortest turn a TSG of a pod may have. A gate costs about as much.
MIN_TSG_TURN_NS = NS_PER_MS

#: Latency targets an online pod may have. Even the shortest slice of a neighbour adds a quarter of a millisecond.
MIN_LATENCY_TARGET_NS = 250 * NS_PER_US
MAX_LATENCY_TARGET_NS = NS_PER_S


#: The most of a pGPU that may be set aside for offline pods, in per cent.
MAX_OFFLINE_FLOOR = 50
#: How many times a pGPU's memory may be granted at most.
MAX_MEMORY_OVERCOMMIT = 8

#: Offline pods get back what they are short of the floor over FLOOR_SPAN_NS, at up to FLOOR_TIMES the floor.
FLOOR_SPAN_NS = 400 * NS_PER_MS
FLOOR_TIMES = 8


class PodClass(StrEnum):
    """Whether a pod's latency matters (online) or the pod takes the time that is left (offline)."""

    ONLINE = "online"
    OFFLINE = "offline"


class OnIdle(StrEnum):
    """What happens to the rest of a window when the pod it belongs to is idle.

    On every plane a pod is idle if it ran nothing while its gate was last open.
    """

    YIELD = "yield"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Grant:
    """A pod's grant on one pGPU.

    ``cores`` is its quota in per cent of the pGPU's time (None: no quota). ``memory`` is its limit in bytes (None: no
    limit). ``latency_target_ns`` is how much sharing may add to the 99th percentile of an online pod's latency
    (None: as little as possible). ``profiling`` lets profilers read the card's counters, which tell of its neighbours.
    ``graphics`` lets it draw (OpenGL, Vulkan); a draw runs to its end, however long its neighbours wait.
    """

    pod_class: PodClass = PodClass.OFFLINE
    cores: int | None = None
    memory: int | None = None
    latency_target_ns: int | None = None
    profiling: bool = False
    graphics: bool = False

    def __post_init__(self) -> None:
        if self.cores is not None and not 1 <= self.cores <= 100:
            raise InvalidValueError(f"cores {self.cores}: a quota is 1 to 100 per cent of a pGPU")
        if self.memory is not None and self.memory <= 0:
            raise InvalidValueError(f"memory {self.memory}: a memory limit is a positive number of bytes")
        if self.latency_target_ns is not None:
            self._check_latency_target(self.latency_target_ns)

    def _check_latency_target(self, target_ns: int) -> None:
        if not MIN_LATENCY_TARGET_NS <= target_ns <= MAX_LATENCY_TARGET_NS:
            raise InvalidValueError(
                f"latency target {target_ns / NS_PER_MS:g} ms: a target is "
                f"{MIN_LATENCY_TARGET_NS / NS_PER_MS:g} ms to {MAX_LATENCY_TARGET_NS // NS_PER_S} s"
            )
        if self.pod_class is not PodClass.ONLINE:
            raise InvalidValueError("latency target: only online pods have one; make the pod --class online")


#: Start and end, in ns on the clock of the sample that contains it.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """What a container may ask for: classes, ``cores`` in per cent and ``memory`` in bytes at most, and its own name.

    ``memory`` None means any amount.
    """

    classes: frozenset[PodClass] = frozenset(PodClass)
    cores: int = 100
    memory: int | None = None
    name: bool = True


#: An image's author may not choose the online class, more than half of a pGPU, or the pod's name.
_UNTRUSTED = RequestBounds(frozenset({PodClass.OFFLINE}), 50, name=False)


@dataclass(frozen=True, slots=True)
class ContainerPolicy:
    """What containers may ask for: by any means, and by environment variables, which an image can set.

    ``by_environment`` None: environment variables are ignored.
    """

    from_anywhere: RequestBounds = field(default_factory=RequestBounds)
    by_environment: RequestBounds | None = _UNTRUSTED


@dataclass(frozen=True, slots=True)
class TsgSample:
    """What one TSG did since the last sample: its GPU time in ns, and how often it was switched in."""

    tsg: str
    run_ns: int = 0
    starts: int = 0
    #: True while the hardware holds this TSG's context on the engine.
    resident: bool = False
    #: When it ran, in order; the spans add up to ``run_ns``. Empty unless ``Backend.detailed`` is set.
    runs: tuple[Span, ...] = ()
    #: The longest turn that ended since the last sample, in ns, even if it began before.
    longest_ns: int = 0


@dataclass(frozen=True, slots=True)
class PodSample:
    """One pod as the backend found it: its grant on this pGPU and its compute TSGs."""

    pod: str
    grant: Grant
    tsgs: tuple[TsgSample, ...] = ()
    #: How long its gate was closed since the last sample, in ns.
    gated_ns: int = 0
    #: When it was closed, in order. Empty unless ``Backend.detailed`` is set and the backend knows.
    closed: tuple[Span, ...] = ()
    #: Switches since the last sample from an offline pod directly to an online one: those away from this pod, and those
    #: to it. None where the plane does not count them.
    preempted: int | None = None
    preempting: int | None = None
    #: GPU time, in ns, and switches since the last sample of compute TSGs that have ended.
    ended_ns: int = 0
    ended_starts: int = 0
    #: How many GPFIFO entries the card took from its compute channels since the last sample: its progress in units of
    #: its own. None where the plane cannot tell.
    gpfifo_entries: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """What happened on one pGPU since the last sample. ``now_ns`` is CLOCK_MONOTONIC (or the simulator's)."""

    pgpu: int
    now_ns: int
    pods: tuple[PodSample, ...] = ()
    #: NVML's utilization: the part, 0 to 1, of about the last fifth of a second in which any kernel ran. None: unknown.
    utilization: float | None = None


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the busy pods of one class take their turns.

    By default, by timeslices in the ratio of weights: ``round_ns`` is how long one turn of every pod lasts together
    (None: as long as the period). With ``equal``, by the driver's own timeslice, the same for all weights. With
    ``by_gate``, each pod has the GPU to itself for its part of a period, except that ``ungated`` pods have no window:
    they run at any time, in slices beside the pod whose turn it is. ``slice_factors`` names pods without a quota: their
    slices are only this part of what their weights give. With ``reserved``, a part of each period, the ``ungated`` pods
    have the GPU to themselves for that part, and all pods take turns by timeslices in the rest.
    """

    round_ns: int | None = None
    by_gate: bool = False
    equal: bool = False
    slice_factors: tuple[tuple[str, float], ...] = ()
    ungated: frozenset[str] = frozenset()
    reserved: float = 0.0


# Named tuples, not frozen dataclasses: they cost a third, and the loop makes one of each for every pod and tick.


class Tsg(NamedTuple):
    """A time-slice group of a pod on the compute engine; ``busy`` if it had work lately."""

    tsg: str
    busy: bool = False


class Pod(NamedTuple):
    """All that a policy may know about a pod."""

    name: str
    grant: Grant = Grant()
    tsgs: tuple[Tsg, ...] = ()
    #: Measured time beyond (positive) or short of (negative) what plans aimed at while it was busy; bounded.
    debt_ns: int = 0
    #: It gets all it asks for under timeslices, so it needs no turn by gate.
    satisfied: bool = False
    #: Its steps fit into its timeslice. A policy may lengthen the timeslice somewhat, so that no step is cut.
    fits_slice: bool = False
    #: Its work comes in so many pieces that the switches to it and back cost more than short waits save.
    fragmented: bool = False
    #: Its processes are just starting: they hardly ran yet and wait for one short step after the other.
    starting: bool = False
    #: Its processes start so often that another one may not run in the windows of others.
    start_budget_spent: bool = False

    @property
    def busy(self) -> bool:
        """Tell whether any of its TSGs had work lately."""
        return True in [tsg.busy for tsg in self.tsgs]  # twice as fast as any(); every tick asks this for every pod

    @property
    def online(self) -> bool:
        """Tell whether the pod is of the online class."""
        return self.grant.pod_class is PodClass.ONLINE

    @property
    def busy_tsgs(self) -> int:
        """Return how many TSGs had work lately, at least 1: the turns that the hardware gives this pod in a round."""
        return [tsg.busy for tsg in self.tsgs].count(True) or 1


@dataclass(frozen=True, slots=True)
class GangTurn:
    """A gang's turn: the part of the period in which it runs on all of its pGPUs at once."""

    pod: str
    start_ns: int
    end_ns: int
    #: How long the turn would be without any debt.
    due_ns: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a policy may see of one pGPU."""

    pgpu: int
    period_ns: int
    pods: tuple[Pod, ...] = ()
    #: Gangs' turns, as agreed with other pGPUs, ordered by start; they do not overlap.
    gang_turns: tuple[GangTurn, ...] = ()
    #: Per cent of the GPU that offline pods get whatever online pods want.
    offline_floor: int = 0
    #: How much offline pods came short of the floor, in ns; bounded.
    offline_short_ns: int = 0
    #: How the slice tuner wants the pods of each class to take turns.
    offline: Sharing = Sharing()
    online: Sharing = Sharing()
    #: The card's name as NVML reports it; what was measured of it is in ``qgpu.model.hardware_traits``.
    card: str = ""

    def __post_init__(self) -> None:
        if not MIN_PERIOD_NS <= self.period_ns <= MAX_PERIOD_NS:
            raise InvalidValueError(
                f"period {self.period_ns / NS_PER_MS:g} ms: a period is "
                f"{MIN_PERIOD_NS // NS_PER_MS} ms to {MAX_PERIOD_NS // NS_PER_S} s"
            )
        if len({pod.name for pod in self.pods}) != len(self.pods):
            raise InvalidValueError(f"pGPU {self.pgpu}: two pods of one name")


@dataclass(frozen=True, slots=True)
class Window:
    """One turn of a pod in a period: its gate is open from ``start_ns`` to ``end_ns``."""

    start_ns: int
    end_ns: int
    on_idle: OnIdle = OnIdle.KEEP

    def __post_init__(self) -> None:
        if not 0 <= self.start_ns < self.end_ns:
            raise InvalidValueError(f"window {self.start_ns}..{self.end_ns}: empty or backwards")


@dataclass(frozen=True, slots=True)
class PodPlan:
    """One pod's part of a plan.

    - ``timeslice_us`` is set on each of its compute TSGs.
    - ``windows``: when its gate is open. None means always, an empty tuple means never.
    - ``weight`` is what the plan aims at: the pod's part of the time that the busy pods of its class use together. 0
      means that its quota, of all time, binds it instead. The ledger and the copy engines use it.
    - ``copy_timeslice_us`` is set on each of its copy TSGs; None leaves them the driver's own.
    - ``tsg_turn_ns``: while its gate is open, its busy compute TSGs take turns of this length, one at a time. None
      means that all run at once.
    """

    pod: str
    pod_class: PodClass
    timeslice_us: int
    windows: tuple[Window, ...] | None = None
    weight: int = 0
    copy_timeslice_us: int | None = None
    tsg_turn_ns: int | None = None

    def __post_init__(self) -> None:
        if not MIN_TIMESLICE_US <= self.timeslice_us <= MAX_TIMESLICE_US:
            raise InvalidValueError(f"pod {self.pod}: timeslice {self.timeslice_us} µs is out of bounds")
        if self.copy_timeslice_us is not None and not MIN_TIMESLICE_US <= self.copy_timeslice_us <= MAX_TIMESLICE_US:
            raise InvalidValueError(f"pod {self.pod}: copy timeslice {self.copy_timeslice_us} µs is out of bounds")
        if self.tsg_turn_ns is not None and not MIN_TSG_TURN_NS <= self.tsg_turn_ns <= MAX_PERIOD_NS:
            raise InvalidValueError(f"pod {self.pod}: turns of {self.tsg_turn_ns} ns for its TSGs are out of bounds")
        if self.weight < 0:
            raise InvalidValueError(f"pod {self.pod}: weight {self.weight} is negative")
        for before, after in zip(self.windows or (), (self.windows or ())[1:], strict=False):
            if after.start_ns < before.end_ns:
                raise InvalidValueError(f"pod {self.pod}: windows overlap or are out of order")

    @property
    def turn_ns(self) -> int | None:
        """Return how much of a period its own windows take, in ns; None without any."""
        return None if self.windows is None else sum(window.end_ns - window.start_ns for window in self.windows)


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens on one pGPU in every period, until the next plan or the end of the lease."""

    pgpu: int
    period_ns: int
    pods: tuple[PodPlan, ...] = ()
    #: The floor that this plan aims at, for the ledger: per cent of the GPU for offline pods together.
    offline_floor: int = 0
    #: How pods of each class take turns, for the ledger; None where something else decides.
    offline: Sharing | None = None
    online: Sharing | None = None

    def __post_init__(self) -> None:
        for pod in self.pods:
            if pod.windows and pod.windows[-1].end_ns > self.period_ns:
                raise InvalidValueError(f"pod {pod.pod}: a window ends after the period")

    @property
    def gated(self) -> bool:
        """Tell whether any gate of this plan ever closes."""
        return any(pod.windows is not None for pod in self.pods)

    def gates_may_overlap(self, ending: Set[str]) -> bool:
        """Tell whether gates may open just before those of the pods in ``ending`` close.

        Not beside online pods, which would wait for both; nor if slices are the shortest: switches would take the time.
        """
        if any(pod.pod_class is PodClass.ONLINE for pod in self.pods):
            return False
        return any(pod.timeslice_us > MIN_TIMESLICE_US for pod in self.pods if pod.pod in ending)


#: A policy is a pure function: no clock, no I/O, no memory of its own.
Policy = Callable[[Snapshot], Plan]
