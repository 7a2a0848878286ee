"""The gate worker of a simulated pGPU: takes a plan, keeps its time, and opens everything when its lease ends.

What a moment of the plan asks for is decided by ``qgpu.sched.timeline``; this file makes the calls one after
the other, each taking as long as the hardware makes it take, closing before opening. Phases count from
time 0, so a plan renewed in mid-period goes on where the last one was.
"""

from __future__ import annotations

from bisect import bisect_right

from qgpu.errors import RefusedError
from qgpu.model import Plan
from qgpu.sched.timeline import Timeline
from qgpu.sim.gpu import SimGpu, SimPod


class GateWorker:
    """Executes plans on one simulated pGPU."""

    def __init__(self, gpu: SimGpu) -> None:
        self._gpu = gpu
        self._timeline: Timeline | None = None
        self._remembered: dict[tuple[int, frozenset[str]], frozenset[str]] = {}
        self._lease_ends_ns = 0
        self._lease_watched = False
        self._calling = False
        #: The one wake that counts; earlier ones that are still in the event list have been overtaken.
        self._wake_ns: int | None = None

    def apply(self, plan: Plan) -> None:
        """Take a plan for one lease. Raises RefusedError for a plan of another pGPU."""
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

    def give_up(self) -> None:
        """Drop the plan: default timeslices, and every gate opened."""
        self._timeline = None
        for pod in self._gpu.pods.values():
            pod.idle = False
        self.refresh()

    def refresh(self) -> None:
        """Do for a pod or TSG that has just come what the plan in force says of it."""
        self._remembered.clear()
        self._set_timeslices()
        self._look()

    def _watch_lease(self) -> None:
        self._lease_watched = self._timeline is not None and self._gpu.now_ns <= self._lease_ends_ns
        if self._lease_watched:
            self._gpu.at(self._lease_ends_ns + 1, self._watch_lease)
        else:
            self.give_up()

    def _set_timeslices(self) -> None:
        planned = {} if self._timeline is None else {part.pod: part.timeslice_us for part in self._timeline.plan.pods}
        for pod in self._gpu.pods.values():
            for tsg in pod.tsgs:
                tsg.timeslice_us = planned.get(pod.name, self._gpu.hardware.default_timeslice_us)

    def _look(self) -> None:
        """Make the next call that the moment asks for; with none to make, wake when the moment changes."""
        if self._calling:
            return
        gpu, closed = self._gpu, self._closed()
        shut = frozenset(name for name, pod in gpu.pods.items() if not pod.open)
        if closed == shut:
            self._sleep()
            return
        wrong = gpu.pods[min(closed - shut or shut - closed)]
        self._calling = True
        gpu.at(gpu.now_ns + self._call_ns(wrong), lambda: self._call_done(wrong))

    def _closed(self) -> frozenset[str]:
        """Name the pods of this pGPU that the plan wants closed now; between two edges the answer is remembered."""
        if self._timeline is None:
            return frozenset()
        phase_ns = self._gpu.now_ns % self._timeline.plan.period_ns
        idle = frozenset(name for name, pod in self._gpu.pods.items() if pod.idle)
        key = (bisect_right(self._timeline.edges, phase_ns), idle)
        if key not in self._remembered:
            self._remembered[key] = self._timeline.closed(phase_ns, idle)
        return self._remembered[key] & self._gpu.pods.keys()

    def _call_done(self, pod: SimPod) -> None:
        self._calling = False
        if self._gpu.pods.get(pod.name) is pod:
            pod.move(self._gpu.now_ns, to_open=not pod.open)
            if not pod.open:
                self._gpu.engine.leave(pod)
        self._look()

    def _call_ns(self, pod: SimPod) -> int:
        cost = self._gpu.hardware
        if self._gpu.contended(pod):
            return cost.contended_close_ns if pod.open else cost.contended_open_ns
        return cost.close_ns if pod.open else cost.open_ns

    def _sleep(self) -> None:
        """Ask to be woken at the next edge of the plan; a wake asked for earlier has been overtaken."""
        if self._timeline is None:
            return
        now_ns = self._gpu.now_ns
        until_next_ns = self._timeline.until_next(now_ns % self._timeline.plan.period_ns)
        if until_next_ns is None:
            return
        self._wake_ns = when_ns = now_ns + until_next_ns

        def wake() -> None:
            if self._wake_ns == when_ns:
                self._wake_ns = None
                self._look()

        self._gpu.at(when_ns, wake)
