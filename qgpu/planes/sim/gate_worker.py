"""The gate worker of a simulated pGPU: enforces a plan over time, and opens everything when its lease ends.

``qgpu.model.timeline`` decides which gates are closed at a time. This file makes the calls one after the other, each as
slow as on hardware, in the guardian's order. Phases count from time 0, so a plan that is renewed in mid-period
continues. ``qgpu.model.tsg_turns`` decides which TSG of a pod has its turn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial

from qgpu.errors import RefusedError
from qgpu.model import Plan
from qgpu.model.timeline import Timeline
from qgpu.model.tsg_turns import TsgTurns
from qgpu.planes.sim.engine import Tsg
from qgpu.planes.sim.gpu import SimGpu, SimPod


class GateWorker:
    """Enforces plans on one simulated pGPU."""

    def __init__(self, gpu: SimGpu) -> None:
        self._gpu = gpu
        self._timeline: Timeline | None = None
        self._closed_cache: dict[tuple[int, frozenset[str]], frozenset[str]] = {}
        self._lease_ends_ns = 0
        self._lease_watched = False
        self._calling = False
        #: The current wake-up time; earlier wake-ups in the event list are obsolete.
        self._wake_ns: int | None = None
        #: Turns of the TSGs in pods whose TSGs take turns, and the time up to which they are advanced.
        self._tsg_turns: dict[str, TsgTurns[Tsg]] = {}
        self._turns_as_of_ns = 0

    def apply(self, plan: Plan) -> None:
        """Install a plan for one lease. Raises RefusedError for a plan of another pGPU."""
        gpu = self._gpu
        if plan.pgpu != gpu.index:
            raise RefusedError(f"pGPU {gpu.index}: this plan is for pGPU {plan.pgpu}")
        if self._timeline is None or self._timeline.plan != plan:
            self._timeline = Timeline(plan)
            self.refresh()
        self._lease_ends_ns = gpu.now_ns + gpu.hardware.lease_ns
        if not self._lease_watched:
            self._lease_watched = True
            gpu.at(self._lease_ends_ns + 1, self._watch_lease)

    def drop_plan(self) -> None:
        """Drop the plan: every timeslice the default, every gate open."""
        self._timeline = None
        for pod in self._gpu.pods.values():
            pod.idle = False
        self.refresh()

    def refresh(self) -> None:
        """Apply the plan in force to a new pod or TSG."""
        self._closed_cache.clear()
        self._set_timeslices()
        self._step()

    def _watch_lease(self) -> None:
        self._lease_watched = self._timeline is not None and self._gpu.now_ns <= self._lease_ends_ns
        if self._lease_watched:
            self._gpu.at(self._lease_ends_ns + 1, self._watch_lease)
        else:
            self.drop_plan()

    def _set_timeslices(self) -> None:
        planned = {} if self._timeline is None else {part.pod: part.timeslice_us for part in self._timeline.plan.pods}
        for pod in self._gpu.pods.values():
            for tsg in pod.tsgs:
                tsg.timeslice_us = planned.get(pod.name, self._gpu.hardware.default_timeslice_us)

    def _step(self) -> None:
        """Make the next gate call that is due; without one, sleep until the next change."""
        if self._calling:
            return
        gpu, closed = self._gpu, self._closed()
        self._advance_tsg_turns(closed)
        shut = frozenset(name for name, pod in gpu.pods.items() if not pod.open)
        if closed != shut:
            opens, closes = shut - closed, closed - shut
            wrong = gpu.pods[min((opens or closes) if self._opens_first(closes) else (closes or opens))]
            self._call(wrong, closing=wrong.open, done=lambda: self._pod_moved(wrong))
            return
        self._rotate_tsgs()
        for pod in gpu.pods.values():
            closes_first = not self._opens_first({pod.name})
            for closing in (closes_first, not closes_first):
                moving = self._resting(pod) ^ {tsg for tsg in pod.tsgs if tsg.resting}
                tsgs = [tsg for tsg in pod.tsgs if pod.open and tsg in moving and tsg.resting is not closing]
                if tsgs:
                    self._call(pod, closing=closing, done=partial(self._tsgs_moved, pod, tsgs, resting=closing))
                    return
        self._sleep()

    def _advance_tsg_turns(self, closing: Set[str] = frozenset()) -> None:
        """Advance the turns of pods' TSGs to now, before the gates of the pods in ``closing`` close."""
        gpu = self._gpu
        passed_ns, self._turns_as_of_ns = gpu.now_ns - self._turns_as_of_ns, gpu.now_ns
        before, self._tsg_turns = self._tsg_turns, {}
        for part in self._timeline.plan.pods if self._timeline else ():
            pod = gpu.pods.get(part.pod)
            if part.tsg_turn_ns is None or pod is None:
                continue
            used_ns = {tsg: tsg.run_ns for tsg in pod.tsgs}
            turns = before.get(part.pod, TsgTurns(part.tsg_turn_ns, used_ns=used_ns))
            turns = replace(turns, turn_ns=part.tsg_turn_ns).with_tsgs(used_ns)
            if part.pod in before and pod.open:
                turns = turns.advanced(passed_ns)
                if part.pod in closing:
                    turns = turns.gate_closed()
            self._tsg_turns[part.pod] = turns

    def _opens_first(self, closes: Set[str]) -> bool:
        """Tell whether gates open before those of ``closes`` close, as ``Plan.gates_may_overlap`` says."""
        return self._timeline is not None and self._timeline.plan.gates_may_overlap(closes)

    def _rotate_tsgs(self) -> None:
        """At the end of a turn, find which TSGs had work."""
        for name, turns in self._tsg_turns.items():
            pod = self._gpu.pods[name]
            if turns.check_due and pod.open:
                self._tsg_turns[name] = turns.checked({tsg: tsg.run_ns for tsg in pod.tsgs})

    def _resting(self, pod: SimPod) -> frozenset[Tsg]:
        """Return the TSGs of a pod that are off while another has its turn."""
        turns = self._tsg_turns.get(pod.name)
        return frozenset() if turns is None else turns.resting

    def _closed(self) -> frozenset[str]:
        """Return the pods of this pGPU that the plan closes now; cached between two window edges."""
        if self._timeline is None:
            return frozenset()
        phase_ns = self._gpu.now_ns % self._timeline.plan.period_ns
        idle = frozenset(name for name, pod in self._gpu.pods.items() if pod.idle)
        key = (bisect_right(self._timeline.edges, phase_ns), idle)
        if key not in self._closed_cache:
            self._closed_cache[key] = self._timeline.closed(phase_ns, idle)
        return self._closed_cache[key] & self._gpu.pods.keys()

    def _call(self, pod: SimPod, *, closing: bool, done: Callable[[], None]) -> None:
        """Make a gate call for a pod, which takes effect when it returns."""
        cost = self._gpu.hardware
        if self._gpu.contended(pod):
            took_ns = cost.contended_close_ns if closing else cost.contended_open_ns
        else:
            took_ns = cost.close_ns if closing else cost.open_ns
        self._calling = True

        def returned() -> None:
            self._calling = False
            done()
            self._gpu.engine.drop_closed_context()
            self._step()

        self._gpu.at(self._gpu.now_ns + took_ns, returned)

    def _pod_moved(self, pod: SimPod) -> None:
        if self._gpu.pods.get(pod.name) is pod:
            self._advance_tsg_turns()
            pod.move(self._gpu.now_ns, to_open=not pod.open)
            resting = self._resting(pod)
            for tsg in pod.tsgs:
                tsg.resting = tsg in resting  # one call moves all of them

    def _tsgs_moved(self, pod: SimPod, tsgs: Sequence[Tsg], *, resting: bool) -> None:
        for tsg in tsgs if self._gpu.pods.get(pod.name) is pod else ():
            tsg.resting = resting

    def _sleep(self) -> None:
        """Schedule a wake-up at the next edge of the plan; it replaces an earlier one."""
        if self._timeline is None:
            return
        now_ns = self._gpu.now_ns
        dues = [turns.until_next_ns for name, turns in self._tsg_turns.items() if self._gpu.pods[name].open]
        dues.append(self._timeline.until_next(now_ns % self._timeline.plan.period_ns))
        until_next_ns = min((due for due in dues if due is not None), default=None)
        if until_next_ns is None:
            return
        self._wake_ns = when_ns = now_ns + until_next_ns

        def wake() -> None:
            if self._wake_ns == when_ns:
                self._wake_ns = None
                self._step()

        self._gpu.at(when_ns, wake)
