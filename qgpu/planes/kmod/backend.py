"""Enforces plans on one pGPU through the module: converts qgpu's plans to its structs, and its pods to samples.

The module sees no kernel run, so GPU time comes from a source that the caller passes. It has no gate per TSG either. If
a plan gives the TSGs of a pod turns, they all run at once, with suitable timeslices.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import structlog

from qgpu.errors import BackendGoneError, RefusedError
from qgpu.model import MIN_TIMESLICE_US, NS_PER_MS, Grant, OnIdle, Plan, PodPlan, PodSample, Sample, TsgSample
from qgpu.model.preemptions import preemptions
from qgpu.model.tsg_turns import all_at_once
from qgpu.planes.kmod import DEVICE
from qgpu.planes.kmod.device import CLASSES, Card, Device, grant_of, missing_for_limits, problem_of, text_of
from qgpu.planes.kmod.uapi import NUMBERS, ffi

_log = structlog.get_logger("kmod")

#: A pod that ran nothing for this part of a turn, with its gate open, let the turn pass: moving gates takes the rest.
_WHOLE = 0.75
#: How long a plan holds without renewal. The loop renews it four times a second. Opening gates included, every gate is
#: open and every timeslice the driver's own within a second of the daemon's end.
LEASE_NS = 800 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class TsgRef:
    """A TSG as the module identifies it, for a source of GPU time to find."""

    ident: int
    client: int
    handle: int
    #: The makers of the clients that have a handle on it: of a share group's TSG, MPS's server and its clients.
    tgids: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return its name in samples."""
        return f"{self.client:x}/{self.handle:x}"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a source measured since its last reading, by TsgRef.ident."""

    tsgs: Mapping[int, TsgSample]
    #: How often the engine switched straight from one TSG to another; None if that is not counted.
    handovers: Mapping[tuple[int, int], int] | None = None


class GpuTimeSource(Protocol):
    """Measures GPU time on one card."""

    #: If set, readings list when each TSG ran.
    detailed: bool

    @property
    def lost(self) -> int:
        """Return how many context-switch records the hardware dropped so far."""

    def read(self, tsgs: Sequence[TsgRef]) -> Reading:
        """Return what these TSGs did since the last call; a TSG that is missing did nothing."""

    def close(self) -> None:
        """Stop measuring."""


class KmodBackend:
    """Enforces plans on one pGPU through the module."""

    def __init__(
        self,
        index: int,
        card: Card,
        gpu_time: GpuTimeSource,
        used: Callable[[], float | None] = lambda: None,
        left: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        """Take ``left``: which pods of the module are retired. Their gates are closed while a plan is in force."""
        self._index, self._card, self._gpu_time, self._used, self._left = index, card, gpu_time, used, left
        self._device = Device()
        #: The plan in force, with the retired pods whose gates it closes.
        self._applied: tuple[Plan, frozenset[int]] | None = None
        self._gated: dict[int, int] = {}
        #: The TSGs of the last sample, by pod.
        self._refs: Mapping[int, Sequence[TsgRef]] = {}
        self._quiet_ns: dict[int, int] = {}
        #: By pod name, how many of its TSGs ran when any of them last did.
        self._ran_tsgs: dict[str, int] = {}
        self._sampled_ns = 0
        #: Why the module refuses limits, as last logged.
        self._missing = ""
        #: Whether the module said so when it was last asked.
        self._stalled = False

    @property
    def detailed(self) -> bool:
        """Tell whether samples list when pods ran; the module does not report when their gates were closed."""
        return self._gpu_time.detailed

    @detailed.setter
    def detailed(self, wanted: bool) -> None:
        self._gpu_time.detailed = wanted

    @property
    def lost(self) -> int:
        """Return how many context-switch records the hardware dropped so far."""
        return self._gpu_time.lost

    def sample(self) -> Sample:
        """Report what happened since the last call. Raises BackendGoneError while the module enforces nothing."""
        info = self._device.info()
        if problem := problem_of(info):
            raise BackendGoneError(f"qgpu.ko: {problem}")
        if (missing := missing_for_limits(info)) != self._missing:
            self._missing = missing
            if missing:
                _log.warning("limits are refused", pgpu=self._index, reason=missing)
            else:
                _log.warning("limits are granted again", pgpu=self._index)
        self._tell_stall(bool(info.stalled >> self._card.number & 1))
        try:
            return self._sample()
        except OSError as error:
            raise BackendGoneError(f"pGPU {self._index}: {DEVICE}: {error.strerror}; dmesg may say why") from error

    def _sample(self) -> Sample:
        pods = [(pod, grant_of(self._device, pod.pod, self._card)) for pod in self._pods(self._left())]
        refs = {pod.pod: self._tsgs(pod.pod) for pod, grant in pods if grant}
        # before GPU time is read: a gate that opens after this line counts as closed, never as open and idle
        before, self._gated = self._gated, {}
        gated_ns = {pod: self._take_gated_ns(pod, before) for pod in refs}
        ended, self._refs = _ended(self._refs, refs), refs
        known = {pod: [*tsgs, *ended[pod]] for pod, tsgs in refs.items()}
        # those that live first: a process's time is that of the first of its TSGs
        reading = self._gpu_time.read([ref for each in (refs, ended) for tsgs in each.values() for ref in tsgs])
        now_ns = time.monotonic_ns()
        elapsed_ns, self._sampled_ns = now_ns - self._sampled_ns, now_ns
        counts = _preemptions(reading.handovers, pods, known)
        samples = []
        quiet_ns, self._quiet_ns = self._quiet_ns, {}
        ran_tsgs, self._ran_tsgs = self._ran_tsgs, {}
        for pod, grant in pods:
            if grant is None:
                continue
            tsgs = tuple(reading.tsgs.get(ref.ident, TsgSample(ref.name)) for ref in refs[pod.pod])
            ran = sum(tsg.run_ns > 0 for tsg in tsgs)
            open_ns = max(0, elapsed_ns - gated_ns[pod.pod])
            self._quiet_ns[pod.pod] = 0 if ran else quiet_ns.get(pod.pod, 0) + open_ns
            name = text_of(pod.name)
            self._ran_tsgs[name] = ran or ran_tsgs.get(name, 0)
            preempted, preempting = (None, None) if counts is None else (count[name] for count in counts)
            gone = [reading.tsgs[ref.ident] for ref in ended[pod.pod] if ref.ident in reading.tsgs]
            ended_ns, ended_starts = sum(tsg.run_ns for tsg in gone), sum(tsg.starts for tsg in gone)
            samples.append(
                PodSample(name, grant, tsgs, gated_ns[pod.pod], (), preempted, preempting, ended_ns, ended_starts)
            )
        return Sample(self._index, now_ns, tuple(samples), self._used() if samples else None)

    def apply(self, plan: Plan) -> None:
        """Install a plan, or renew it if it is in force. Raises RefusedError."""
        if plan.pgpu != self._index:
            raise RefusedError(f"pGPU {self._index}: this plan is for pGPU {plan.pgpu}")
        plan = replace(plan, pods=tuple(all_at_once(part, self._ran_tsgs.get(part.pod, 0)) for part in plan.pods))
        try:
            wanted = plan, self._left()
            if wanted != self._applied or not self._renew():
                self._install(*wanted)
                self._applied = wanted
        except OSError as error:
            self._applied = None
            raise RefusedError(f"pGPU {self._index}: the module refused the plan: {error.strerror}") from error
        self._tell_idle(plan)

    def wait(self, timeout_ns: int) -> None:
        """Wait for a change among the pods."""
        self._device.wait(timeout_ns)

    def close(self) -> None:
        """Close the device; the module opens every gate."""
        self._device.close()
        self._gpu_time.close()

    def _tell_stall(self, stalled: bool) -> None:
        if stalled and not self._stalled:
            _log.warning("card stalled: gates move when the driver answers again", pgpu=self._index, pci=self._card.pci)
        elif self._stalled and not stalled:
            _log.info("the driver answers again", pgpu=self._index, pci=self._card.pci)
        self._stalled = stalled

    def _pods(self, left: frozenset[int]) -> Iterator[Any]:
        return (pod for pod in self._device.each("POD_NEXT", "pod") if pod.pod not in left)

    def _tsgs(self, pod: int) -> list[TsgRef]:
        return [
            TsgRef(tsg.id, tsg.client, tsg.handle, self._tgids(tsg))
            for tsg in self._device.each("TSG_NEXT", "id", pod=pod, gpu=self._card.number)
            if tsg.flags & NUMBERS["QGPU_ENGINE_COMPUTE"]
        ]

    def _tgids(self, tsg: Any) -> tuple[int, ...]:
        if not tsg.flags & NUMBERS["QGPU_TSG_SHARED"]:
            return (tsg.tgid,)
        handles = self._device.each("HANDLE_NEXT", "stamp", tsg=tsg.id, gpu=self._card.number)
        return tuple(dict.fromkeys(handle.tgid for handle in handles)) or (tsg.tgid,)

    def _take_gated_ns(self, pod: int, before: Mapping[int, int]) -> int:
        try:
            total_ns = int(self._device.call("USAGE", pod=pod, gpu=self._card.number).gated_ns)
        except FileNotFoundError:  # the pod was removed meanwhile
            return 0
        self._gated[pod] = total_ns
        return total_ns - before.get(pod, total_ns)

    def _tell_idle(self, plan: Plan) -> None:
        """Tell the module which pods with yielding windows are idle: it sees no kernel run."""
        lenders = {part.pod: part for part in plan.pods if any(w.on_idle is OnIdle.YIELD for w in part.windows or ())}
        for pod in self._pods(self._left()) if lenders else ():
            if part := lenders.get(text_of(pod.name)):
                try:
                    idle = self._quiet_ns.get(pod.pod, 0) >= _WHOLE * (part.turn_ns or 0)
                    self._device.call("IDLE", pod=pod.pod, gpu=self._card.number, idle=idle)
                except FileNotFoundError:  # the pod or the plan is gone; the next tick handles that
                    continue

    def _renew(self) -> bool:
        try:
            self._device.call("RENEW", gpu=self._card.number)
        except FileNotFoundError:
            return False
        return True

    def _install(self, plan: Plan, left: frozenset[int]) -> None:
        idents = {text_of(pod.name): pod.pod for pod in self._pods(left)}
        windows: list[dict[str, int]] = []
        parts = [_closed(ident) for ident in sorted(left)]
        for part in plan.pods:
            if part.pod in idents:
                parts.append(_part(part, idents[part.pod], len(windows)))
                windows += [
                    {
                        "start_ns": window.start_ns,
                        "end_ns": window.end_ns,
                        "flags": NUMBERS["QGPU_WINDOW_YIELD"] if window.on_idle is OnIdle.YIELD else 0,
                    }
                    for window in part.windows or ()
                ]
        c_parts, c_windows = ffi.new("struct qgpu_pod_plan[]", parts), ffi.new("struct qgpu_window[]", windows)
        self._device.call(
            "PLAN",
            gpu=self._card.number,
            period_ns=plan.period_ns,
            lease_ns=LEASE_NS,
            nr_pods=len(parts),
            nr_windows=len(windows),
            pods=int(ffi.cast("uintptr_t", c_parts)),
            windows=int(ffi.cast("uintptr_t", c_windows)),
            pod_plan_size=ffi.sizeof("struct qgpu_pod_plan"),
        )


#: A gate that covers copy TSGs too.
_WHOLE_GATE = NUMBERS["QGPU_POD_PLAN_GATED"] | NUMBERS["QGPU_POD_PLAN_COPIES"]


def _part(part: PodPlan, ident: int, first_window: int) -> dict[str, int]:
    gated = part.windows is not None
    return {
        "pod": ident,
        "timeslice_us": part.timeslice_us,
        "pod_class": CLASSES[part.pod_class],
        "flags": _gate(part),
        "first_window": first_window if gated else 0,
        "nr_windows": len(part.windows or ()),
        "copy_timeslice_us": part.copy_timeslice_us or 0,
    }


def _gate(part: PodPlan) -> int:
    """Say what a pod's gate covers: copies too if no window is lent, because then its quota is of all time."""
    if part.windows is None:
        return 0
    lends = any(window.on_idle is OnIdle.YIELD for window in part.windows)
    return NUMBERS["QGPU_POD_PLAN_GATED"] if lends else _WHOLE_GATE


def _closed(ident: int) -> dict[str, int]:
    return {"pod": ident, "timeslice_us": MIN_TIMESLICE_US, "flags": _WHOLE_GATE}


def _ended(before: Mapping[int, Sequence[TsgRef]], now: Mapping[int, Sequence[TsgRef]]) -> dict[int, list[TsgRef]]:
    """List the TSGs of each pod that have ended since the last sample."""
    alive = {ref.ident for tsgs in now.values() for ref in tsgs}
    return {pod: [ref for ref in before.get(pod, ()) if ref.ident not in alive] for pod in now}


def _preemptions(
    handovers: Mapping[tuple[int, int], int] | None,
    pods: Iterable[tuple[Any, Grant | None]],
    refs: Mapping[int, Iterable[TsgRef]],
) -> tuple[Counter[str], Counter[str]] | None:
    if handovers is None:
        return None
    names = {pod.pod: text_of(pod.name) for pod, _ in pods}
    owners = {ref.ident: names[pod] for pod, tsgs in refs.items() for ref in tsgs}
    between: Counter[tuple[str, str]] = Counter()
    for (before, after), count in handovers.items():
        between[owners[before], owners[after]] += count
    return preemptions(between, {names[pod.pod]: grant.pod_class for pod, grant in pods if grant})
