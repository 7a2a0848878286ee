"""Enforces the plan of one pGPU: moves gates at window edges, and sets timeslices when they change.

A gate covers a pod's compute TSGs. It covers the pod's copy TSGs only if none of its windows is lent. Otherwise the
copy engines are shared by timeslices alone, because a gate over fewer channels moves faster. If a plan gives the TSGs
of a pod turns, the gate is open over all of them except those that wait for their turn. Under a plan, TSGs that no
plan reaches do not run: those of lost clients, and those of retired pods.

It decides nothing. The plan says everything; without a plan every gate is open, and every TSG has the timeslice that
its owner set. Time comes in as an argument and goes out as the time of the next step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.rm_object import Key, RmObject
from qgpu.guardian.gpu.gpu_ops import GpuOps, Moved
from qgpu.model import MIN_TIMESLICE_US, NS_PER_MS, OnIdle, Plan, Span
from qgpu.model.timeline import Timeline
from qgpu.model.tsg_turns import TsgTurns
from qgpu.nvidia import abi
from qgpu.nvidia.rm_device import RmDevice

#: A gate that RM refused to move is tried again after this long.
RETRY_NS = 100 * NS_PER_MS
#: After this many failures to set timeslices, a client's other TSGs wait for the next try.
_TRIES = 3
#: How many timeslices are set before the guardian's main loop does its other work: RM takes 0.2 to 0.5 ms for each.
_AT_ONCE = 64
#: And how long it may take: a pod can put other files in the places where its clients' files were.
_STEP_NS = 10 * NS_PER_MS
#: A gate takes 0.4 to 0.9 ms to close, but 10 to 40 ms over a kernel that reads host memory without end
#: (docs/decisions/0027). A gate that takes longer than _SLOW_NS is closed earlier by the time it takes.
_SLOW_NS = 2 * NS_PER_MS
_SLOWEST_NS = 50 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class _Moves:
    """The results of moving gates: whether a channel did not move, and when in ns all were open and all were closed."""

    stuck: bool
    until_open_ns: int
    until_closed_ns: int
    closing: Moved


@dataclass(slots=True)
class Enforcer:
    """The plan in force on one pGPU, and what has been done for it."""

    device: RmDevice
    table: ObjectTable
    gpu_ops: GpuOps
    #: Called with channels and TSGs that no longer exist, or whose client was not reached.
    missed: Callable[[Iterable[Key]], None]
    #: GPU time so far in ns of each compute TSG of a pod, as of the last drain: shows which pods left a window idle.
    tsgs_used_ns: Callable[[str], Mapping[Key, int]]
    #: Drains the card's context-switch log. Gates move first and do not wait for it.
    drain: Callable[[int], None]
    plan: Plan | None = None
    closed: frozenset[str] = frozenset()
    _timeline: Timeline | None = None
    #: Pods whose gate covers their copy TSGs too: they lend none of their windows while they are idle.
    _copies_gated: frozenset[str] = frozenset()
    _closed_channels: set[Key] = field(default_factory=set)
    _timeslices_us: dict[Key, int] = field(default_factory=dict)
    #: When to set those that are not set: because RM refused some, or because they are many; None if all are set.
    _timeslices_due_ns: int | None = None
    #: In this round over all TSGs: those that were tried, and how often it failed by client.
    _tried: set[Key] = field(default_factory=set)
    _failures: Counter[int] = field(default_factory=Counter)
    #: Channels being freed: a free may wait for queued work, so they stay open whatever the plan says.
    _freeing: set[Key] = field(default_factory=set)
    #: The channels and TSGs of which the fields above say something, as of one revision of the object table.
    _objects: dict[Key, RmObject] = field(default_factory=dict)
    _objects_as_of: int = -1
    _idle: set[str] = field(default_factory=set)
    _opened_with: dict[str, int] = field(default_factory=dict)
    _gated_since: dict[str, int] = field(default_factory=dict)
    _closed_spans: dict[str, list[Span]] = field(default_factory=dict)
    #: How long closing a pod's gate took the last time, as far as that is believed; and usually, for slow gates only.
    _last_close_ns: dict[str, int] = field(default_factory=dict)
    _slow_ns: dict[str, int] = field(default_factory=dict)
    #: Pods whose gates RM was slow to open the last time, or refused to.
    _slow_to_open: set[str] = field(default_factory=set)
    #: Turns of the TSGs in pods whose TSGs take turns, and the time up to which they are advanced.
    _tsg_turns: dict[str, TsgTurns[Key]] = field(default_factory=dict)
    _turns_as_of_ns: int = 0

    def adopt(self, plan: Plan | None, now_ns: int) -> None:
        """Put a plan in force, or none."""
        if plan is None:
            self._idle.clear()
        self.plan = plan
        self._timeline = Timeline(plan) if plan is not None else None
        windows = {part.pod: part.windows for part in (plan.pods if plan else ()) if part.windows is not None}
        lending = {pod for pod, own in windows.items() if any(each.on_idle is not OnIdle.KEEP for each in own)}
        self._copies_gated = frozenset(windows.keys() - lending)
        self.refresh(now_ns)

    def refresh(self, now_ns: int) -> None:
        """Update gates and timeslices after the plan, the pods or their objects changed."""
        self.step(now_ns)
        self._set_timeslices(now_ns)

    def step(self, now_ns: int) -> int | None:
        """Do what is due; return the time in ns until the next step, or None for never."""
        self._forget_replaced()
        wanted: frozenset[str] = frozenset()
        wait: int | None = None
        if self._timeline is not None:
            # Periods start at multiples of their length on this clock; the daemon's rounds start there too.
            phase = now_ns % self._timeline.plan.period_ns
            wanted = self._timeline.closed(phase, self._idle, self._slow_ns)
            wait = self._timeline.until_next(phase, self._slow_ns)
        self._advance_tsg_turns(now_ns, wanted)
        known = self.table.pods.keys()  # a plan may name a pod that was retired since
        opened, shut = (self.closed - wanted) & known, (wanted - self.closed) & known
        had_ns = {pod: self._used_ns(pod) for pod in opened}
        moves = self._set_gates(wanted)
        if wanted != self.closed:
            self.closed = wanted
            self._learn_close_time(shut, moves.closing)
            open_ns = now_ns + moves.until_open_ns
            for pod, used_ns in had_ns.items():
                self._opened_with[pod] = used_ns
                self._closed_spans.setdefault(pod, []).append((self._gated_since.pop(pod, open_ns), open_ns))
            self._record_closed(shut, now_ns + moves.until_closed_ns)
        stuck = self._rotate_tsgs(now_ns) or moves.stuck
        if self._timeslices_due_ns is not None and now_ns >= self._timeslices_due_ns:
            self._set_timeslices(now_ns)
        turn_ends = (turns.until_next_ns for pod, turns in self._tsg_turns.items() if pod not in self.closed)
        wait = min((due for due in (wait, *turn_ends) if due is not None), default=None)
        slices = self._timeslices_due_ns - now_ns if self._timeslices_due_ns is not None else RETRY_NS
        waits_for_rm = stuck or self._timeslices_due_ns is not None
        return min(RETRY_NS, slices, wait or RETRY_NS) if waits_for_rm else wait

    def until_lock_fits(self, pod: str, held_ns: int, now_ns: int) -> int:
        """Return the ns until RM's lock may be held for ``held_ns`` in a pod's own turn; callable from any thread."""
        timeline = self._timeline
        return timeline.until_lock_fits(pod, now_ns % timeline.plan.period_ns, held_ns) if timeline is not None else 0

    def forget_timeslices(self) -> None:
        """Forget which timeslices are set, so that all are set again: an earlier guardian may have set others."""
        tsgs = (*self.table.compute_tsgs(self.device.instance), *self.table.copy_tsgs(self.device.instance))
        self._timeslices_us = dict.fromkeys(self._remember(tsg.key for tsg in tsgs), 0)

    def open_for_free(self, channels: list[Key]) -> None:
        """Open channels that are about to be freed, and keep them open."""
        self._forget_replaced()
        self._freeing |= self._remember(channels)
        self._open([key for key in channels if key in self._closed_channels])

    def _remember(self, keys: Iterable[Key]) -> set[Key]:
        """Remember which objects keys mean now; return the keys of those that are known."""
        known = {key: rm for key in keys if (rm := self.table.objects.get(key)) is not None}
        self._objects |= known
        return set(known)

    def _forget_replaced(self) -> None:
        """Forget what was done to objects that are gone: RM may have given their handles to others."""
        if self._objects_as_of == self.table.revision:
            return
        self._objects_as_of = self.table.revision
        for key in [key for key, rm in self._objects.items() if self.table.objects.get(key) is not rm]:
            del self._objects[key]
            self._closed_channels.discard(key)
            self._freeing.discard(key)
            self._timeslices_us.pop(key, None)

    def cancel_free(self, channels: list[Key]) -> None:
        """Gate channels again that RM did not free."""
        self._freeing -= set(channels)

    def forget(self, pod: str) -> None:
        """Forget a retired pod: another pod may get its name."""
        self._idle.discard(pod)
        self._slow_to_open.discard(pod)
        gates: tuple[dict[str, Any], ...] = (self._opened_with, self._gated_since, self._closed_spans, self._tsg_turns)
        for by_pod in (*gates, self._slow_ns, self._last_close_ns):
            by_pod.pop(pod, None)

    def take_closed(self, pod: str, now_ns: int) -> list[Span]:
        """Return the spans in which a pod's gate was closed since the last call."""
        spans = self._closed_spans.pop(pod, [])
        if (since := self._gated_since.get(pod)) is not None:
            spans.append((since, now_ns))
            self._gated_since[pod] = now_ns
        return spans

    def _advance_tsg_turns(self, now_ns: int, closing: Set[str]) -> None:
        """Advance the turns of pods' TSGs to now, before the gates of the pods in ``closing`` close."""
        passed_ns, self._turns_as_of_ns = now_ns - self._turns_as_of_ns, now_ns
        before, self._tsg_turns = self._tsg_turns, {}
        for part in self.plan.pods if self.plan else ():
            if part.tsg_turn_ns is None or part.pod not in self.table.pods:
                continue
            turns = replace(before.get(part.pod, TsgTurns(part.tsg_turn_ns)), turn_ns=part.tsg_turn_ns)
            used_ns = self.tsgs_used_ns(part.pod)
            if turns.used_ns.keys() != used_ns.keys():
                turns = turns.with_tsgs(used_ns)
            if part.pod in before and part.pod not in self.closed:
                turns = turns.advanced(passed_ns)
                if part.pod in closing:
                    turns = turns.gate_closed()
            self._tsg_turns[part.pod] = turns

    def _used_ns(self, pod: str) -> int:
        return sum(self.tsgs_used_ns(pod).values())

    def _rotate_tsgs(self, now_ns: int) -> bool:
        """At the end of a turn, find which TSGs had work, and move their gates; True if one did not move.

        Gates that are due move first, so that reading the log does not delay them.
        """
        due = {pod for pod, turns in self._tsg_turns.items() if turns.check_due and pod not in self.closed}
        if not due:
            return False
        self.drain(now_ns)
        for pod in due:
            self._tsg_turns[pod] = self._tsg_turns[pod].checked(self.tsgs_used_ns(pod))
        return self._set_gates(self.closed).stuck

    def _learn_close_time(self, pods: Set[str], moved: Moved) -> None:
        """Learn how long closing takes, from calls that concerned one pod and succeeded at once.

        One that takes much longer than the last may have waited for another pod's call: it counts as twice the last.
        """
        if len(pods) != 1 or moved.gone or moved.stuck or not moved.took_ns:
            return
        (pod,) = pods
        took_ns = min(moved.took_ns, 2 * max(_SLOW_NS, self._last_close_ns.get(pod, moved.took_ns)))
        self._last_close_ns[pod] = took_ns
        usual_ns = (self._slow_ns.pop(pod, took_ns) + took_ns) // 2
        if usual_ns >= _SLOW_NS:
            self._slow_ns[pod] = min(_SLOWEST_NS, usual_ns)

    def _record_closed(self, pods: Set[str], now_ns: int) -> None:
        self._gated_since |= dict.fromkeys(pods, now_ns)
        tried = {pod: before for pod in pods if (before := self._opened_with.pop(pod, None)) is not None}
        if tried:
            self.drain(now_ns)
        for pod, before_ns in tried.items():
            # Less than before: another pod has this name, or some of its processes have ended. That is not idle.
            (self._idle.discard if self._used_ns(pod) != before_ns else self._idle.add)(pod)

    def _set_gates(self, wanted: frozenset[str]) -> _Moves:
        """Move gates.

        Gates open before others close: two pods then share the card for the length of the call, in which it would idle
        otherwise. They close first beside online pods, and where opening takes several calls or is slow
        (docs/decisions/0059-open-before-close.md).
        """
        resting = {tsg for turns in self._tsg_turns.values() for tsg in turns.resting}
        instance = self.device.instance
        lost = self.gpu_ops.lost if self.plan is not None else set[int]()
        retired = self.table.retired_pods() if self.plan is not None else set[str]()
        compute_tsgs = self.table.compute_tsgs(instance) if wanted or resting or lost or retired else ()
        compute = self._channels(compute_tsgs, wanted | retired, lost, resting)
        with_copies = (wanted & self._copies_gated) | retired
        copy_tsgs = self.table.copy_tsgs(instance) if with_copies or lost else ()
        copies = self._channels(copy_tsgs, with_copies, lost)
        to_open = sorted(self._closed_channels - compute - copies)
        compute, copies = compute - self._closed_channels, copies - self._closed_channels
        opens_first = self._may_overlap(to_open, compute | copies)
        opened = self._open(to_open) if opens_first else Moved()
        # Copy engines need preemption: no other TSG may want them.
        by_slices = compute if compute and self._hands_over(wanted, opens=bool(to_open)) else set[Key]()
        preempted = (compute | copies) - by_slices
        closed = _merged(self._close(by_slices, preempt=False), self._close(preempted, preempt=True))
        if not opens_first:
            opened = self._open(to_open)
        until_ns = opened.took_ns + closed.took_ns
        until_open_ns, until_closed_ns = (opened.took_ns, until_ns) if opens_first else (until_ns, closed.took_ns)
        return _Moves(bool(opened.stuck or closed.stuck), until_open_ns, until_closed_ns, closed)

    def _may_overlap(self, opening: Sequence[Key], closing: Iterable[Key]) -> bool:
        """Tell whether channels open before others close."""
        if self.plan is None or not self.plan.gates_may_overlap(self._pods_of(closing)):
            return False
        return len(opening) <= abi.MAX_DISABLE_CHANNELS and self._slow_to_open.isdisjoint(self._pods_of(opening))

    def _pods_of(self, channels: Iterable[Key]) -> set[str]:
        return {self.table.pod_of(rm) for key in channels if (rm := self.table.objects.get(key)) is not None}

    def _channels(
        self, tsgs: Iterable[RmObject], pods: Set[str], lost: Set[int], resting: Set[Key] = frozenset()
    ) -> set[Key]:
        """List channels, except those being freed, of TSGs that rest, whose pod is given or whose client is lost."""
        own = [tsg for tsg in tsgs if tsg.client in lost or tsg.key in resting or self.table.pod_of(tsg) in pods]
        return {channel.key for tsg in own for channel in self.table.channels(tsg)} - self._freeing

    def _close(self, channels: set[Key], *, preempt: bool) -> Moved:
        if not channels:
            return Moved()
        moved = self.gpu_ops.gate(self.device, sorted(channels), closed=True, preempt=preempt)
        if moved.gone:
            self.missed(moved.gone)
        self._closed_channels |= self._remember(channels - moved.gone - moved.stuck)
        return moved

    def _hands_over(self, wanted: frozenset[str], *, opens: bool) -> bool:
        """Tell whether minimal timeslices make the hardware itself switch away from the TSGs that are being closed.

        Another TSG must be ready to run: one that is opened, or one whose turn it is. A pod that keeps its windows
        would run on in the window of one that had nothing to run last time.
        """
        if (wanted - self.closed) & self._copies_gated and self.closed - wanted <= self._idle:
            return False
        closing = wanted | self._tsg_turns.keys()
        parts = self.plan.pods if self.plan else ()
        short = all(part.timeslice_us <= MIN_TIMESLICE_US for part in parts if part.pod in closing)
        return short and (opens or any(turns.resting for pod, turns in self._tsg_turns.items() if pod not in wanted))

    def _open(self, channels: list[Key]) -> Moved:
        """Open gates; those that did not move must be tried again."""
        known, pods = [key for key in channels if key in self.table.objects], self._pods_of(channels)
        moved = self.gpu_ops.gate(self.device, known, closed=False) if known else Moved()
        if moved.gone:
            self.missed(moved.gone)
        self._slow_to_open -= pods
        if moved.stuck or moved.gone or moved.took_ns >= _SLOW_NS:
            self._slow_to_open |= pods
        self._closed_channels -= set(channels) - moved.stuck
        return moved

    def _set_timeslices(self, now_ns: int) -> None:
        """Set the requested timeslice of each pod's TSGs if it is not set; other TSGs get what their owners set.

        After _AT_ONCE of them, or _STEP_NS, the next step goes on. No TSG is tried twice before each was tried.
        """
        parts = self.plan.pods if self.plan else ()
        compute, copies = self.table.compute_tsgs(self.device.instance), self.table.copy_tsgs(self.device.instance)
        of_compute = {part.pod: part.timeslice_us for part in parts}
        of_copies = {part.pod: us for part in parts if (us := part.copy_timeslice_us) is not None}
        lost, most, again, until_ns = self.gpu_ops.lost, _AT_ONCE, False, time.monotonic_ns() + _STEP_NS
        for tsg, asked in chain(zip(compute, repeat(of_compute)), zip(copies, repeat(of_copies))):
            wanted = asked.get(self.table.pod_of(tsg), tsg.requested_us)
            if self._timeslices_us.get(tsg.key, abi.RM_DEFAULT_TIMESLICE_US) == wanted:
                continue
            if tsg.rm_class in abi.GPFIFO_CLASSES:
                continue  # the TSG around it has no handle
            if tsg.client in lost or self._failures[tsg.client] >= _TRIES:
                continue
            if tsg.key in self._tried:  # the plan has changed meanwhile, unless RM refused
                again = again or tsg.client not in self._failures
                continue
            if most == 0 or time.monotonic_ns() > until_ns:
                self._timeslices_due_ns = now_ns
                return
            most -= 1
            self._tried.add(tsg.key)
            if self.gpu_ops.timeslice(tsg, wanted):
                self._timeslices_us[tsg.key] = wanted
                self._objects[tsg.key] = tsg
            else:
                self._failures[tsg.client] += 1
                self.missed([tsg.key])
        later_ns = 0 if again else RETRY_NS if self._failures else None
        self._timeslices_due_ns = now_ns + later_ns if later_ns is not None else None
        self._tried, self._failures = set(), Counter()


def _merged(first: Moved, second: Moved) -> Moved:
    return Moved(first.gone | second.gone, first.stuck | second.stuck, first.took_ns + second.took_ns)
