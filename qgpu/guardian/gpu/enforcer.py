"""Carries out the plan of one pGPU: gates at the edges of windows, timeslices when they change.

A pod's compute TSGs are behind its gate. Its copy TSGs are so only where nothing of its windows is lent: else their
timeslices alone share the copy engines, for the fewer channels a gate has, the quicker it moves.
Where the TSGs of a pod are to take turns, its gate is open over all of them but those that wait for theirs.

Decides nothing: a plan says it all, and without a plan every gate is open and every timeslice its owner's.
Time comes in as an argument and leaves as the next moment something is due.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Protocol

from qgpu.guardian.accounting.object_table import Key, ObjectTable, RmObject
from qgpu.model import MIN_TIMESLICE_US, NS_PER_MS, OnIdle, Plan, Span
from qgpu.model.timeline import Timeline
from qgpu.model.tsg_turns import TsgTurns
from qgpu.nvidia import abi

#: A gate that RM would not move is tried again after this long.
RETRY_NS = 100 * NS_PER_MS

#: Of a client's TSGs so many may fail to get their timeslices before the others are left for the next try.
_TRIES = 3

#: A gate takes 0.4 to 0.9 ms to close, but 10 to 40 ms over a kernel that reads host memory without end
#: (docs/decisions/0027): one that takes longer than this is closed as much earlier.
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
        """Set a timeslice; False when the TSG is no more, or its client cannot be reached."""

    def unreachable(self) -> Set[int]:
        """Return the RM clients whose TSGs' timeslices cannot be set: these do not run while there is a plan."""


@dataclass(slots=True)
class Enforcer:
    """The plan in force on one pGPU and what has been done about it."""

    instance: int
    table: ObjectTable
    mechanism: Mechanism
    #: GPU time a pod has had so far, in ns, as of the last drain: tells who let a window go by idle.
    used_ns: Callable[[str], int]
    #: The same for each compute TSG of a pod.
    tsgs_used_ns: Callable[[str], Mapping[Key, int]]
    #: Reads the card's log of context switches; gates are not kept waiting for it.
    drain: Callable[[int], None]
    plan: Plan | None = None
    closed: frozenset[str] = frozenset()
    _timeline: Timeline | None = None
    #: Pods whose gate is over their copies too.
    _copies_gated: frozenset[str] = frozenset()
    _closed_channels: set[Key] = field(default_factory=set)
    _slices: dict[Key, int] = field(default_factory=dict)
    #: Whether a timeslice could not be set, and when that is tried again.
    _unset: bool = False
    _set_again_ns: int = 0
    #: Channels being freed: a free may wait for queued work, so their gate stays open whatever the plan says.
    _leaving: set[Key] = field(default_factory=set)
    _idle: set[str] = field(default_factory=set)
    _opened_with: dict[str, int] = field(default_factory=dict)
    _gated_since: dict[str, int] = field(default_factory=dict)
    _closed_spans: dict[str, list[Span]] = field(default_factory=dict)
    #: How long it has taken of late to close the gate of a pod, where that is long.
    _slow_ns: dict[str, int] = field(default_factory=dict)
    #: Of the pods whose TSGs take turns: how these stand, and up to when that was reckoned.
    _tsg_turns: dict[str, TsgTurns[Key]] = field(default_factory=dict)
    _reckoned_ns: int = 0
    #: Compute TSGs by pod, as of one revision of the register.
    _listed: dict[str, set[Key]] = field(default_factory=dict)
    _listed_as_of: int = -1

    def adopt(self, plan: Plan | None, now_ns: int) -> None:
        """Put a plan in force, or none."""
        if plan is None:
            self._idle.clear()
        self.plan = plan
        self._timeline = Timeline(plan) if plan is not None else None
        self._copies_gated = _keepers(plan) if plan is not None else frozenset()
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
        self._let_turns_pass(now_ns, wanted)
        known = self.table.pods.keys()  # plans may still name one that was retired
        opened, shut = (self.closed - wanted) & known, (wanted - self.closed) & known
        had_ns = {pod: self.used_ns(pod) for pod in opened}
        stuck, moved = self._set_gates(wanted)
        if wanted != self.closed:
            self.closed = wanted
            self._reckon_closing(shut, moved)
            self._reckon_opened(had_ns, now_ns + moved.took_ns)
            self._reckon_shut(shut, now_ns + moved.took_ns)
        stuck = self._look_at_tsgs(now_ns) or stuck
        if self._unset and now_ns >= self._set_again_ns:
            self._set_again_ns = now_ns + RETRY_NS
            self._set_slices()
        stuck = stuck or self._unset
        reconciler = (turns.until_next_ns for pod, turns in self._tsg_turns.items() if pod not in self.closed)
        wait = min((due for due in (wait, *reconciler) if due is not None), default=None)
        return min(RETRY_NS, wait or RETRY_NS) if stuck else wait

    def distrust(self) -> None:
        """Forget what timeslices are set, because somebody else set them: each is then set anew."""
        tsgs = (*self.table.compute_tsgs(self.instance), *self.table.copy_tsgs(self.instance))
        self._slices = {tsg.key: 0 for tsg in tsgs}

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
        self._tsg_turns.pop(pod, None)

    def take_closed(self, pod: str, now_ns: int) -> list[Span]:
        """Return from when to when a pod's gate was closed since the last call."""
        spans = self._closed_spans.pop(pod, [])
        if (since := self._gated_since.get(pod)) is not None:
            spans.append((since, now_ns))
            self._gated_since[pod] = now_ns
        return spans

    def _let_turns_pass(self, now_ns: int, closing: Set[str]) -> None:
        """Bring the turns of pods' TSGs up to now, when the gates of these pods are about to be closed."""
        passed_ns, self._reckoned_ns = now_ns - self._reckoned_ns, now_ns
        before, self._tsg_turns = self._tsg_turns, {}
        for part in self.plan.pods if self.plan else ():
            if part.tsg_turn_ns is None or part.pod not in self.table.pods:
                continue
            turns = before.get(part.pod, TsgTurns(part.tsg_turn_ns))
            if turns.turn_ns != part.tsg_turn_ns:
                turns = replace(turns, turn_ns=part.tsg_turn_ns)
            if turns.used_ns.keys() != self._tsgs_of(part.pod):
                turns = turns.among(self.tsgs_used_ns(part.pod))
            if part.pod in before and part.pod not in self.closed:
                turns = turns.later(passed_ns)
                if part.pod in closing:
                    turns = turns.shut()
            self._tsg_turns[part.pod] = turns

    def _tsgs_of(self, pod: str) -> Set[Key]:
        """Return a pod's compute TSGs; listed anew only where the register has changed."""
        if self._listed_as_of != self.table.revision:
            self._listed_as_of, self._listed = self.table.revision, {}
            for tsg in self.table.compute_tsgs(self.instance):
                self._listed.setdefault(self.table.pod_of(tsg), set()).add(tsg.key)
        return self._listed.get(pod, set())

    def _look_at_tsgs(self, now_ns: int) -> bool:
        """Where it is time, see which TSGs had work, and move their gates; True when one would not move.

        Gates that are due move first, so that reading the log does not delay them.
        """
        due = {pod for pod, turns in self._tsg_turns.items() if turns.look_due and pod not in self.closed}
        if not due:
            return False
        self.drain(now_ns)
        for pod in due:
            self._tsg_turns[pod] = self._tsg_turns[pod].looked(self.tsgs_used_ns(pod))
        return self._set_gates(self.closed)[0]

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
        resting = {tsg for turns in self._tsg_turns.values() for tsg in turns.resting}
        lost = self.mechanism.unreachable() if self.plan is not None else frozenset()
        compute_tsgs = self.table.compute_tsgs(self.instance) if wanted or resting or lost else ()
        compute = self._channels(compute_tsgs, wanted, resting, lost)
        with_copies = wanted & self._copies_gated
        copy_tsgs = self.table.copy_tsgs(self.instance) if with_copies or lost else ()
        copies = self._channels(copy_tsgs, with_copies, lost=lost)
        to_open = self._closed_channels - compute - copies
        compute, copies = compute - self._closed_channels, copies - self._closed_channels
        if compute and self._hands_over(wanted, opens=bool(to_open)):
            # Nobody may be there to take a copy engine over.
            moved = _both(self._close(compute, preempt=False), self._close(copies, preempt=True))
        else:
            moved = self._close(compute | copies, preempt=True)
        return self._open(sorted(to_open)) or bool(moved.stuck), moved

    def _channels(
        self,
        tsgs: Iterable[RmObject],
        pods: Set[str],
        resting: Set[Key] = frozenset(),
        lost: Set[int] = frozenset(),
    ) -> set[Key]:
        """Name the channels, but those being freed, of TSGs that are these pods' or rest or whose client is lost."""
        own = [tsg for tsg in tsgs if tsg.client in lost or tsg.key in resting or self.table.pod_of(tsg) in pods]
        return {channel.key for tsg in own for channel in self.table.channels(tsg)} - self._leaving

    def _close(self, channels: set[Key], *, preempt: bool) -> Moved:
        if not channels:
            return Moved()
        moved = self.mechanism.gate(sorted(channels), closed=True, preempt=preempt)
        self._closed_channels |= channels - moved.gone - moved.stuck
        return moved

    def _hands_over(self, wanted: frozenset[str], *, opens: bool) -> bool:
        """Tell whether the shortest slices make the hardware itself take the engine from who is being closed.

        Somebody has to be there to take it: who is opened, or the TSG that another one rests for.
        """
        closing = wanted | self._tsg_turns.keys()
        parts = self.plan.pods if self.plan else ()
        short = all(part.timeslice_us <= MIN_TIMESLICE_US for part in parts if part.pod in closing)
        return short and (opens or any(turns.resting for pod, turns in self._tsg_turns.items() if pod not in wanted))

    def _open(self, channels: list[Key]) -> bool:
        """Open gates; True when one would not, and is to be tried again."""
        known = [key for key in channels if key in self.table.objects]
        moved = self.mechanism.gate(known, closed=False) if known else Moved()
        self._closed_channels -= set(channels) - moved.stuck
        return bool(moved.stuck)

    def _set_slices(self) -> None:
        self._unset = False
        parts = self.plan.pods if self.plan else ()
        compute, copies = self.table.compute_tsgs(self.instance), self.table.copy_tsgs(self.instance)
        self._put_slices(compute, {part.pod: part.timeslice_us for part in parts})
        self._put_slices(copies, {part.pod: us for part in parts if (us := part.copy_timeslice_us) is not None})
        alive = {tsg.key for tsg in (*compute, *copies)}
        self._slices = {key: us for key, us in self._slices.items() if key in alive}
        self._leaving = {key for key in self._leaving if key in self.table.objects}

    def _put_slices(self, tsgs: Iterable[RmObject], asked: Mapping[str, int]) -> None:
        """Set what is asked for each pod's TSGs where it is not set yet; for others what their owners wished."""
        lost, failures = self.mechanism.unreachable(), Counter[int]()
        for tsg in tsgs:
            wanted = asked.get(self.table.pod_of(tsg), tsg.wish_us)
            if self._slices.get(tsg.key, abi.RM_DEFAULT_TIMESLICE_US) == wanted:
                continue
            if tsg.client in lost or failures[tsg.client] >= _TRIES:
                continue
            if self.mechanism.timeslice(tsg, wanted):
                self._slices[tsg.key] = wanted
            else:
                failures[tsg.client] += 1
                self._unset = True


def _keepers(plan: Plan) -> frozenset[str]:
    """Name the pods with a gate and no window that is lent while they are idle."""
    return frozenset(
        part.pod
        for part in plan.pods
        if part.windows is not None and all(window.on_idle is OnIdle.KEEP for window in part.windows)
    )


def _both(first: Moved, second: Moved) -> Moved:
    """Tell of two calls as of one."""
    return Moved(first.gone | second.gone, first.stuck | second.stuck, first.took_ns + second.took_ns)
