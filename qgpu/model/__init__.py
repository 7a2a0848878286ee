"""The values that qgpu reasons about: pods, grants, samples, snapshots, plans.

Everything here is frozen and checks itself, so a wrong value cannot exist. Nothing here reads a clock,
touches a device or imports another part of qgpu but its errors. Time is integer nanoseconds; microseconds
appear only where a number is RM's own (``timeslice_us``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from qgpu.errors import InvalidValueError

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

#: Timeslices a plan may ask for, in µs. Below 50 µs a TSG makes no progress beside a busy neighbour.
MIN_TIMESLICE_US = 50
MAX_TIMESLICE_US = 1_000_000

#: Scheduling periods a pGPU may have. Shorter ones would be eaten by the price of a gate (about 1 ms a turn).
MIN_PERIOD_NS = 10 * NS_PER_MS
MAX_PERIOD_NS = 10 * NS_PER_S

#: Turns that TSGs of one pod may have. Shorter ones would be eaten by the price of a gate.
MIN_TSG_TURN_NS = NS_PER_MS

#: Latency targets an online pod may have. The shortest slice beside it already costs a quarter of a millisecond.
MIN_LATENCY_TARGET_NS = 250 * NS_PER_US
MAX_LATENCY_TARGET_NS = NS_PER_S


#: The most of a pGPU that may be set aside for offline pods, in per cent.
MAX_OFFLINE_FLOOR = 50

#: What offline pods are short of a floor is paid back over this time, by at most so many times the floor.
FLOOR_SPAN_NS = 400 * NS_PER_MS
FLOOR_TIMES = 8


class PodClass(StrEnum):
    """Whether a pod's latency matters (online) or it fills what is left (offline)."""

    ONLINE = "online"
    OFFLINE = "offline"


class OnIdle(StrEnum):
    """What happens to the rest of a window when the pod it belongs to is idle.

    A pod is idle, on every plane, when it ran nothing for as long as its gate was open in its last turn.
    """

    YIELD = "yield"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Grant:
    """What a pod was given on one pGPU.

    ``cores`` is its quota in per cent of the pGPU's time (None: no quota), ``memory`` its limit in bytes
    (None: no limit). ``latency_target_ns`` is what sharing may add to the latency of an online pod, in 99 of 100
    requests (None: as little as can be had).
    """

    pod_class: PodClass = PodClass.OFFLINE
    cores: int | None = None
    memory: int | None = None
    latency_target_ns: int | None = None

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


#: From when to when, in ns on the clock of the sample it is part of.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class MayAsk:
    """What a container may ask for: classes, the most of a pGPU's time and memory (None: any), a name of its choice."""

    classes: frozenset[PodClass] = frozenset(PodClass)
    cores: int = 100
    memory: int | None = None
    name: bool = True


#: An image's author may not put work first, take more than half a pGPU from others, or pass for another pod.
_UNTRUSTED = MayAsk(frozenset({PodClass.OFFLINE}), 50, name=False)


@dataclass(frozen=True, slots=True)
class ContainerPolicy:
    """What containers may ask for: at all, and by environment variables, which an image may bring (None: not heard)."""

    anyhow: MayAsk = field(default_factory=MayAsk)
    by_environment: MayAsk | None = _UNTRUSTED


@dataclass(frozen=True, slots=True)
class TsgSample:
    """What one TSG did since the last sample: GPU time in ns, and how often it was switched in."""

    tsg: str
    run_ns: int = 0
    starts: int = 0
    #: True while the hardware holds this TSG's context on the engine.
    resident: bool = False
    #: When it ran, in order and adding up to ``run_ns``; only where the backend was asked for details.
    runs: tuple[Span, ...] = ()
    #: The longest turn that ended since the last sample, in ns, whenever it began.
    longest_ns: int = 0


@dataclass(frozen=True, slots=True)
class PodSample:
    """One pod as the backend found it: its grant here and its compute TSGs."""

    pod: str
    grant: Grant
    tsgs: tuple[TsgSample, ...] = ()
    #: How long its gate was closed since the last sample, in ns.
    gated_ns: int = 0
    #: When that was, in order; only where the backend was asked for details and knows.
    closed: tuple[Span, ...] = ()
    #: Switches since the last sample from an offline pod straight to an online one, where this pod was the one or the
    #: other; None where the plane does not count them.
    preempted: int | None = None
    preempting: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """What happened on one pGPU since the last sample. ``now_ns`` is CLOCK_MONOTONIC (or the simulator's)."""

    pgpu: int
    now_ns: int
    pods: tuple[PodSample, ...] = ()
    #: The part of the last fifth of a second or so in which any kernel ran, as NVML tells; None where nobody tells.
    utilization: float | None = None


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the busy pods of one class take their turns.

    By timeslice, where ``round_ns`` is how long the turns of all of them last together (None: the period), or by the
    driver's own slices, ``equal`` for all whatever their weights; or by gate, where each has the GPU to itself for its
    part of a period.
    """

    round_ns: int | None = None
    by_gate: bool = False
    equal: bool = False


@dataclass(frozen=True, slots=True)
class Tsg:
    """A time-slice group of a pod on the compute engine; ``busy`` if it had work of late."""

    tsg: str
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Pod:
    """All that a policy may know about a pod."""

    name: str
    grant: Grant = field(default_factory=Grant)
    tsgs: tuple[Tsg, ...] = ()
    used_ns: int = 0
    #: Measured time beyond (positive) or short of (negative) what the plans gave it while it was busy; bounded.
    debt_ns: int = 0
    #: It gets all it asks for by timeslices: a turn by gate would be wasted on it.
    satisfied: bool = False
    #: Its steps fit into its timeslice, which may be somewhat longer, so that none is ever cut.
    fits_slice: bool = False
    #: Its work comes in so many pieces that every switch to it and back counts.
    fragmented: bool = False
    #: It has come only just and hardly ran: its processes still wait for one short step after the other.
    starting: bool = False

    @property
    def busy(self) -> bool:
        """Tell whether any of its TSGs had work of late."""
        return True in [tsg.busy for tsg in self.tsgs]  # any() takes twice as long, and every tick asks of every pod

    @property
    def online(self) -> bool:
        """Tell whether the pod is of the online class."""
        return self.grant.pod_class is PodClass.ONLINE

    @property
    def busy_tsgs(self) -> int:
        """Count the TSGs that had work of late, at least 1: the turns the hardware gives this pod in a round."""
        return sum([tsg.busy for tsg in self.tsgs]) or 1


@dataclass(frozen=True, slots=True)
class Turn:
    """From when to when in the period a pod on several pGPUs has its turn on all of them."""

    pod: str
    start_ns: int
    end_ns: int
    #: How long it would be if nothing was owed.
    due_ns: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a policy may see of one pGPU."""

    pgpu: int
    period_ns: int
    pods: tuple[Pod, ...] = ()
    #: Turns that were agreed on with other pGPUs, in order of their start; they don't overlap.
    turns: tuple[Turn, ...] = ()
    #: Per cent of the GPU that offline pods get whatever online pods want, and what they came short of it; bounded.
    offline_floor: int = 0
    offline_short_ns: int = 0
    #: How pods of each class had best take their turns.
    offline: Sharing = Sharing()
    online: Sharing = Sharing()

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
    """One turn of a pod in a period: from ``start_ns`` to ``end_ns`` its gate is open."""

    start_ns: int
    end_ns: int
    on_idle: OnIdle = OnIdle.KEEP

    def __post_init__(self) -> None:
        if not 0 <= self.start_ns < self.end_ns:
            raise InvalidValueError(f"window {self.start_ns}..{self.end_ns}: empty or backwards")


@dataclass(frozen=True, slots=True)
class PodPlan:
    """One pod's part of a plan.

    ``timeslice_us`` is set on each of its compute TSGs. ``windows`` None means its gate stays open; an
    empty tuple means that it stays closed. ``weight`` is what the plan aims at, for the ledger and for copies: the
    pod's part, in ratio to other busy pods of its class, of the time they use together; 0 stands for its quota
    of all time. ``copy_timeslice_us`` is set on each of its copy TSGs; None leaves them the driver's own. Of the
    planes only seccomp does so yet, and kmod ignores it. ``tsg_turn_ns`` is how long each of its busy compute TSGs has
    its turn while its gate is open and its others are off; None: all at once.
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
    """What shall happen on one pGPU, period after period, until the next plan or the end of the lease."""

    pgpu: int
    period_ns: int
    pods: tuple[PodPlan, ...] = ()
    #: The floor that this plan aims at, for the ledger: per cent of the GPU for offline pods together.
    offline_floor: int = 0
    #: How pods of each class take their turns, for the ledger; None where something else decides.
    offline: Sharing | None = None
    online: Sharing | None = None

    def __post_init__(self) -> None:
        for pod in self.pods:
            if pod.windows and pod.windows[-1].end_ns > self.period_ns:
                raise InvalidValueError(f"pod {pod.pod}: a window ends after the period")

    @property
    def gated(self) -> bool:
        """Tell whether any pod of this plan has a gate that ever closes."""
        return any(pod.windows is not None for pod in self.pods)


#: A policy is a pure function: no clock, no I/O, no memory of its own.
Policy = Callable[[Snapshot], Plan]
