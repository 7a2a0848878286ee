"""Carries out the plan of one pGPU: gates at the edges of windows, timeslices when they change.

Decides nothing: a plan says it all, and without a plan every gate is open and every timeslice its owner's.
Time comes in as an argument and leaves as the next moment something is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol

from qgpu.guardian.register import Key, Register, RmObject
from qgpu.model import MIN_TIMESLICE_US, NS_PER_MS, Plan, Span
from qgpu.rm import abi
from qgpu.sched.timeline import Timeline

#: A gate that RM would not move is tried again after this long.
RETRY_NS = 100 * NS_PER_MS

#: A gate takes 0.4 to 0.9 ms to close, but 10 to 40 ms over a kernel that reads host memory without end
#: (docs/decisions/0031): one that takes longer than this is closed as much earlier.
_SLOW_NS = 2 * NS_PER_MS
_SLOWEST_NS = 50 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of channels whose gate was to be moved, where it was not simply moved."""

    gone: frozenset[Key] = frozenset()
    stuck: frozenset[Key] = frozenset()
    #: How long it took.
    took_ns: int = 0


class Mechanism(Protocol):
    """The two things that can be done to a pod's TSGs on one pGPU."""

    def gate(self, channels: list[Key], *, closed: bool, preempt: bool = True) -> Moved:
        """Close or open gates.

        Without ``preempt`` what runs may run to the end of its timeslice.
        """

    def timeslice(self, tsg: RmObject, timeslice_us: int) -> bool:
        """Set a timeslice; False when the TSG is no more."""


@dataclass(slots=True)
class Enforcer:
    """The plan in force on one pGPU and what has been done about it."""

    instance: int
    register: Register
    mechanism: Mechanism
    #: GPU time a pod has had so far, in ns, as of the last drain: tells who let a window go by idle.
    used_ns: Callable[[str], int]
    #: Reads the card's log of context switches; gates are not kept waiting for it.
    drain: Callable[[int], None]
    plan: Plan | None = None
    closed: frozenset[str] = frozenset()
    _timeline: Timeline | None = None
    _closed_channels: set[Key] = field(default_factory=set)
    _slices: dict[Key, int] = field(default_factory=dict)
    #: Channels being freed: a free may wait for queued work, so their gate stays open whatever the plan says.
    _leaving: set[Key] = field(default_factory=set)
    _idle: set[str] = field(default_factory=set)
    _opened_with: dict[str, int] = field(default_factory=dict)
    _gated_since: dict[str, int] = field(default_factory=dict)
    _closed_spans: dict[str, list[Span]] = field(default_factory=dict)
    #: How long it has taken of late to close the gate of a pod, where that is long.
    _slow_ns: dict[str, int] = field(default_factory=dict)

    def adopt(self, plan: Plan | None, now_ns: int) -> None:
        """Put a plan in force, or none."""
        if plan is None:
            self._idle.clear()
        self.plan = plan
        self._timeline = Timeline(plan) if plan is not None else None
        self.refresh(now_ns)

    def refresh(self, now_ns: int) -> None:
        """Bring gates and timeslices in line after the plan, the pods or their objects changed."""
        self.step(now_ns)
        self._set_slices()

    def step(self, now_ns: int) -> int | None:
        """Do what is due and return when the next thing is, in ns from now; None for never."""
        wanted: frozenset[str] = frozenset()
        wait: int | None = None
        if self._timeline is not None:
            # Periods begin where the clock is a multiple of them: the daemon's rounds begin there too.
            phase = now_ns % self._timeline.plan.period_ns
            wanted = self._timeline.closed(phase, self._idle, self._slow_ns)
            wait = self._timeline.until_next(phase, self._slow_ns)
        known = self.register.pods.keys()  # plans may still name one that was retired
        opened, shut = (self.closed - wanted) & known, (wanted - self.closed) & known
        had_ns = {pod: self.used_ns(pod) for pod in opened}
        stuck, moved = self._set_gates(wanted)
        if wanted != self.closed:
            self.closed = wanted
            self._reckon_closing(shut, moved)
            self._reckon_opened(had_ns, now_ns + moved.took_ns)
            self._reckon_shut(shut, now_ns + moved.took_ns)
        return min(RETRY_NS, wait or RETRY_NS) if stuck else wait

    def distrust(self) -> None:
        """Forget what timeslices are set, because somebody else set them: each is then set anew."""
        self._slices = {tsg.key: 0 for tsg in self.register.compute_tsgs(self.instance)}

    def leave(self, channels: list[Key]) -> None:
        """Open the gate over channels that are about to be freed and keep it open."""
        self._leaving |= set(channels)
        self._open([key for key in channels if key in self._closed_channels])

    def stayed(self, channels: list[Key]) -> None:
        """Gate channels again that were not freed after all."""
        self._leaving -= set(channels)

    def forget(self, pod: str) -> None:
        """Forget what was seen of a pod that is no more: another may come by its name."""
        self._idle.discard(pod)
        self._opened_with.pop(pod, None)
        self._gated_since.pop(pod, None)
        self._closed_spans.pop(pod, None)
        self._slow_ns.pop(pod, None)

    def take_closed(self, pod: str, now_ns: int) -> list[Span]:
        """Return from when to when a pod's gate was closed since the last call."""
        spans = self._closed_spans.pop(pod, [])
        if (since := self._gated_since.get(pod)) is not None:
            spans.append((since, now_ns))
            self._gated_since[pod] = now_ns
        return spans

    def _reckon_closing(self, pods: Set[str], moved: Moved) -> None:
        """Learn how long it takes, from calls that were about one pod and went through at once."""
        if len(pods) != 1 or moved.gone or moved.stuck or not moved.took_ns:
            return
        (pod,) = pods
        usual_ns = (self._slow_ns.pop(pod, moved.took_ns) + moved.took_ns) // 2
        if usual_ns >= _SLOW_NS:
            self._slow_ns[pod] = min(_SLOWEST_NS, usual_ns)

    def _reckon_opened(self, had_ns: Mapping[str, int], now_ns: int) -> None:
        for pod, used_ns in had_ns.items():
            self._opened_with[pod] = used_ns
            self._closed_spans.setdefault(pod, []).append((self._gated_since.pop(pod, now_ns), now_ns))

    def _reckon_shut(self, pods: Set[str], now_ns: int) -> None:
        self._gated_since |= dict.fromkeys(pods, now_ns)
        tried = {pod: before for pod in pods if (before := self._opened_with.pop(pod, None)) is not None}
        if tried:
            self.drain(now_ns)
        for pod, before_ns in tried.items():
            # Less than before: another pod has come by its name, or processes of it have ended. That is not idle.
            (self._idle.discard if self.used_ns(pod) != before_ns else self._idle.add)(pod)

    def _set_gates(self, wanted: frozenset[str]) -> tuple[bool, Moved]:
        """Move what has to move; tell whether something would not, and what became of closing."""
        shut = {
            channel.key
            for tsg in self.register.compute_tsgs(self.instance)
            if self.register.pod_of(tsg) in wanted
            for channel in self.register.channels(tsg)
        } - self._leaving
        to_open = self._closed_channels - shut
        moved = Moved()
        if to_close := sorted(shut - self._closed_channels):
            moved = self.mechanism.gate(to_close, closed=True, preempt=not self._hands_over(wanted, to_open))
            self._closed_channels |= set(to_close) - moved.gone - moved.stuck
        return self._open(sorted(to_open)) or bool(moved.stuck), moved

    def _hands_over(self, wanted: frozenset[str], to_open: set[Key]) -> bool:
        """Tell whether the shortest slices make the hardware itself take the engine from who is being closed."""
        parts = self.plan.pods if self.plan else ()
        short = all(part.timeslice_us <= MIN_TIMESLICE_US for part in parts if part.pod in wanted)
        return short and bool(to_open)

    def _open(self, channels: list[Key]) -> bool:
        """Open gates; True when one would not, and is to be tried again."""
        known = [key for key in channels if key in self.register.objects]
        moved = self.mechanism.gate(known, closed=False) if known else Moved()
        self._closed_channels -= set(channels) - moved.stuck
        return bool(moved.stuck)

    def _set_slices(self) -> None:
        asked = {part.pod: part.timeslice_us for part in self.plan.pods} if self.plan else {}
        tsgs = self.register.compute_tsgs(self.instance)
        for tsg in tsgs:
            wanted = asked.get(self.register.pod_of(tsg), tsg.wish_us)
            if self._slices.get(tsg.key, abi.RM_DEFAULT_TIMESLICE_US) != wanted and self.mechanism.timeslice(
                tsg, wanted
            ):
                self._slices[tsg.key] = wanted
        alive = {tsg.key for tsg in tsgs}
        self._slices = {key: us for key, us in self._slices.items() if key in alive}
        self._leaving = {key for key in self._leaving if key in self.register.objects}
