"""The kmod plane: pods and plans through qgpu.ko, which keeps their time in the kernel.

The module enforces and remembers; this file translates between qgpu's values and /dev/qgpu, and counts true GPU
time with a meter that is handed in, since the module sees no kernel run. What the calls mean stands in
kmod/uapi/qgpu.h.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from qgpu import cgroup
from qgpu.errors import (
    BackendGoneError,
    NoGpuError,
    NotSupportedError,
    PermissionDeniedError,
    QgpuError,
    RefusedError,
    UnknownNameError,
)
from qgpu.model import NS_PER_MS, NS_PER_S, Grant, OnIdle, Plan, PodClass, PodPlan, PodSample, Sample, Span, TsgSample
from qgpu.sched.backend import Pgpu, PodInfo
from qgpu.uapi import COMMANDS, NUMBERS, STRUCTS, ffi

DEVICE = "/dev/qgpu"
#: How long a plan holds without being renewed, and how long a wait lasts at most so that it is.
LEASE_NS = NS_PER_S
_RENEW_NS = 400 * NS_PER_MS
#: A pod that has not run although its gate was open for this long is idle.
_IDLE_AFTER_NS = 20 * NS_PER_MS

_CLASSES = {PodClass.OFFLINE: NUMBERS["QGPU_CLASS_OFFLINE"], PodClass.ONLINE: NUMBERS["QGPU_CLASS_ONLINE"]}
_STATES = {
    NUMBERS["QGPU_STATE_NO_DRIVER"]: "no NVIDIA driver is loaded, or /dev/nvidiactl is missing",
    NUMBERS["QGPU_STATE_UNKNOWN_DRIVER"]: "driver {driver} is unknown to it; it enforces nothing",
    NUMBERS["QGPU_STATE_NO_RM_INTERFACE"]: "it cannot reach the driver; before 565, load qgpu_rm.ko too",
    NUMBERS["QGPU_STATE_OFF"]: "it is switched off (/sys/module/qgpu/parameters/enforce)",
}


@dataclass(frozen=True, slots=True)
class Card:
    """A pGPU as the module knows it: its number there, and its PCI address."""

    number: int
    pci: str
    memory: int


@dataclass(frozen=True, slots=True)
class TsgRef:
    """A TSG as the module knows it, for a meter to find."""

    ident: int
    client: int
    handle: int
    tgid: int


@dataclass(frozen=True, slots=True)
class Used:
    """GPU time of a TSG so far, in ns, how often it was switched in, and whether it is on the engine now."""

    run_ns: int = 0
    starts: int = 0
    resident: bool = False
    #: When it ran since the last read, on CLOCK_MONOTONIC, if the meter was detailed then already.
    runs: tuple[Span, ...] = ()


class Meter(Protocol):
    """True GPU time on one card."""

    #: Set to have reads say from when to when.
    detailed: bool

    @property
    def lost(self) -> int:
        """Count the context switches that the hardware dropped so far."""

    def read(self, tsgs: Sequence[TsgRef]) -> Mapping[int, Used]:
        """Return totals by TsgRef.ident; they only grow."""

    def close(self) -> None:
        """Stop counting."""


class Device:
    """An open /dev/qgpu."""

    def __init__(self) -> None:
        try:
            self.fd = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NoGpuError(f"{DEVICE}: not there; is qgpu.ko loaded?") from error
        except PermissionError as error:
            raise PermissionDeniedError(f"{DEVICE}: {error.strerror}; only root can share a GPU") from error

    def call(self, name: str, /, **fields: Any) -> Any:
        """Issue one ioctl with a struct of these fields and return the struct answered. Raises OSError."""
        if self.fd < 0:
            raise BackendGoneError(f"{DEVICE}: closed")
        arg = ffi.new(STRUCTS[f"QGPU_IOC_{name}"] + " *", fields)
        fcntl.ioctl(self.fd, COMMANDS[f"QGPU_IOC_{name}"], ffi.buffer(arg), True)
        return arg

    def each(self, name: str, key: str, /, **fields: Any) -> Iterator[Any]:
        """Yield the answers of a _NEXT call, from the first to the last."""
        last = 0
        while True:
            try:
                found = self.call(name, **{key: last}, **fields)
            except FileNotFoundError:
                return
            last = getattr(found, key)
            yield found

    def wait(self, timeout_ns: int) -> None:
        """Return when something happened or time is up, having read what happened."""
        ready, _, _ = select.select([self.fd], [], [], timeout_ns / NS_PER_S)
        if ready:
            os.read(self.fd, ffi.sizeof("struct qgpu_event") * 256)

    def close(self) -> None:
        """Hang up: a plan that was installed here is over."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class KmodBackend:
    """Time on one pGPU, kept by the module."""

    def __init__(self, index: int, card: Card, meter: Meter) -> None:
        self._index, self._card, self._meter = index, card, meter
        self._device = Device()
        self._applied: Plan | None = None
        self._used: dict[int, Used] = {}
        self._gated: dict[int, int] = {}
        self._quiet_ns: dict[int, int] = {}
        self._sampled_ns = 0

    @property
    def detailed(self) -> bool:
        """Tell whether samples say when pods ran; when their gates were closed the module does not tell."""
        return self._meter.detailed

    @detailed.setter
    def detailed(self, wanted: bool) -> None:
        self._meter.detailed = wanted

    @property
    def lost(self) -> int:
        """Count the context switches that the hardware dropped so far."""
        return self._meter.lost

    def sample(self) -> Sample:
        """Report what happened since the last call."""
        pods = [(pod, _grant_of(self._device, pod.pod, self._card)) for pod in self._device.each("POD_NEXT", "pod")]
        refs = {pod.pod: self._tsgs(pod.pod) for pod, grant in pods if grant}
        # before the meter: what opens after this line counts as closed, never as open and idle
        gated_ns = {pod: self._take_gated_ns(pod) for pod in refs}
        used = self._meter.read([ref for tsgs in refs.values() for ref in tsgs])
        before, self._used = self._used, dict(used)
        now_ns = time.monotonic_ns()
        elapsed_ns, self._sampled_ns = now_ns - self._sampled_ns, now_ns
        samples = []
        for pod, grant in pods:
            if grant is None:
                continue
            tsgs = tuple(_difference(ref, before.get(ref.ident), used.get(ref.ident)) for ref in refs[pod.pod])
            ran = any(tsg.run_ns for tsg in tsgs)
            quiet_ns = self._quiet_ns.get(pod.pod, 0) + max(0, elapsed_ns - gated_ns[pod.pod])
            self._quiet_ns[pod.pod] = 0 if ran else quiet_ns
            samples.append(PodSample(_text(pod.name), grant, tsgs, gated_ns[pod.pod]))
        return Sample(self._index, now_ns, tuple(samples))

    def apply(self, plan: Plan) -> None:
        """Put a plan in force; one that is in force already is only renewed."""
        if plan.pgpu != self._index:
            raise RefusedError(f"pGPU {self._index}: this plan is for pGPU {plan.pgpu}")
        try:
            if plan != self._applied or not self._renew():
                self._install(plan)
                self._applied = plan
        except OSError as error:
            self._applied = None
            raise RefusedError(f"pGPU {self._index}: the module refused the plan: {error.strerror}") from error
        self._tell_idle(plan)

    def wait(self, timeout_ns: int) -> None:
        """Wait for a change among the pods, but not past the next renewal."""
        self._device.wait(min(timeout_ns, _RENEW_NS))

    def close(self) -> None:
        """Hang up; the module opens every gate."""
        self._device.close()
        self._meter.close()

    def _tsgs(self, pod: int) -> list[TsgRef]:
        return [
            TsgRef(tsg.id, tsg.client, tsg.handle, tsg.tgid)
            for tsg in self._device.each("TSG_NEXT", "id", pod=pod, gpu=self._card.number)
            if tsg.flags & NUMBERS["QGPU_ENGINE_COMPUTE"]
        ]

    def _take_gated_ns(self, pod: int) -> int:
        try:
            total_ns = int(self._device.call("USAGE", pod=pod, gpu=self._card.number).gated_ns)
        except FileNotFoundError:  # removed meanwhile
            return 0
        gated_ns = total_ns - self._gated.get(pod, total_ns)
        self._gated[pod] = total_ns
        return gated_ns

    def _tell_idle(self, plan: Plan) -> None:
        """Say who is idle, of those whose windows yield: the module cannot know."""
        lenders = {part.pod for part in plan.pods if any(w.on_idle is OnIdle.YIELD for w in part.windows or ())}
        for pod in self._device.each("POD_NEXT", "pod") if lenders else ():
            if _text(pod.name) in lenders:
                try:
                    idle = self._quiet_ns.get(pod.pod, 0) >= _IDLE_AFTER_NS
                    self._device.call("IDLE", pod=pod.pod, gpu=self._card.number, idle=idle)
                except FileNotFoundError:  # the pod, or the plan; the next tick sees
                    continue

    def _renew(self) -> bool:
        try:
            self._device.call("RENEW", gpu=self._card.number)
        except FileNotFoundError:
            return False
        return True

    def _install(self, plan: Plan) -> None:
        idents = {_text(pod.name): pod.pod for pod in self._device.each("POD_NEXT", "pod")}
        windows: list[dict[str, int]] = []
        parts = []
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
        )


class KmodHost:
    """The pGPUs and pods of this machine, through the module.

    ``meter`` makes a meter for a card; ``describe`` says what the cards are called, in the order given.
    """

    plane = "kmod"

    def __init__(self, meter: Callable[[Card], Meter], describe: Callable[[Sequence[Card]], Sequence[Pgpu]]) -> None:
        self._device = Device()
        self._meter = meter
        cgroup.mount()
        info = self._device.call("INFO")
        self.driver = _text(info.driver)
        if info.abi != NUMBERS["QGPU_ABI_VERSION"]:
            raise NotSupportedError(f"qgpu.ko: it speaks ABI {info.abi}, this is {NUMBERS['QGPU_ABI_VERSION']}")
        if info.state in _STATES:
            raise NotSupportedError(f"qgpu.ko: {_STATES[info.state].format(driver=self.driver)}")
        #: Where the cgroup of an id was last seen.
        self._paths: dict[int, str] = {}
        self._cards = sorted(map(self._card, range(info.nr_gpus)), key=lambda card: card.pci)
        self._pgpus = list(describe(self._cards))

    def pgpus(self) -> Sequence[Pgpu]:
        """List the cards of this machine in PCI order."""
        return self._pgpus

    def backend(self, pgpu: int) -> KmodBackend:
        """Open the backend of one pGPU."""
        return KmodBackend(pgpu, self._cards[pgpu], self._meter(self._cards[pgpu]))

    def pods(self) -> Sequence[PodInfo]:
        """List the pods the module knows."""
        return [self._info(pod) for pod in self._device.each("POD_NEXT", "pod")]

    def admit(self, name: str, grants: Mapping[int, Grant], at: str = "") -> None:
        """Make a pod of a cgroup, or with one of its own."""
        if not at:
            cgroup.create(name)
        path = at or cgroup.path_of(name)
        fd = os.open(cgroup.mount() / path.lstrip("/"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            ident = self._device.call("POD_ADD", cgroup_fd=fd, name=name.encode()).pod
        except OSError as error:
            raise RefusedError(f"pod {name}: {os.strerror(error.errno or errno.EINVAL)}") from error
        finally:
            os.close(fd)
        try:
            self._grant(ident, grants)
        except BaseException:
            self._device.call("POD_REMOVE", pod=ident)
            raise

    def amend(self, name: str, grants: Mapping[int, Grant]) -> None:
        """Change a pod's grants."""
        self._grant(self._pod(name).pod, grants)

    def attach(self, name: str, pid: int, fds: Sequence[int]) -> None:
        """Bring a process into a pod; what it opens from now on is the pod's."""
        for fd in fds:
            os.close(fd)
        cgroup.bring(name, pid, self._path(self._pod(name)))

    def retire(self, name: str) -> None:
        """Forget a pod and remove its cgroup."""
        self._device.call("POD_REMOVE", pod=self._pod(name).pod)
        cgroup.remove(name)

    def close(self) -> None:
        """Let go; the module keeps the pods for the next daemon."""
        self._device.close()

    def _card(self, number: int) -> Card:
        gpu = self._device.call("GPU", gpu=number)
        return Card(number, f"{gpu.domain:08x}:{gpu.bus:02x}:{gpu.slot:02x}.{gpu.function:x}", gpu.memory)

    def _pod(self, name: str) -> Any:
        for pod in self._device.each("POD_NEXT", "pod"):
            if _text(pod.name) == name:
                return pod
        raise UnknownNameError(f"pod {name}: there is no such pod")

    def _grant(self, ident: int, grants: Mapping[int, Grant]) -> None:
        for pgpu, grant in grants.items():
            try:
                self._device.call(
                    "GRANT_SET",
                    pod=ident,
                    gpu=self._cards[pgpu].number,
                    pod_class=_CLASSES[grant.pod_class],
                    cores=grant.cores or 0,
                    memory=grant.memory or 0,
                    latency_target_ns=grant.latency_target_ns or 0,
                )
            except OSError as error:
                raise QgpuError(f"pGPU {pgpu}: the module refused the grant: {error.strerror}") from error

    def _info(self, pod: Any) -> PodInfo:
        grants, memory = {}, {}
        for index, card in enumerate(self._cards):
            if (grant := _grant_of(self._device, pod.pod, card)) is not None:
                grants[index] = grant
                memory[index] = int(self._device.call("USAGE", pod=pod.pod, gpu=card.number).memory)
        path = self._path(pod)
        pids = cgroup.pids(path) if path else ()
        refused = int(pod.refused_allocs), int(pod.refused_controls)
        return PodInfo(_text(pod.name), grants, pids, memory, _trouble(pod), path, *refused)

    def _path(self, pod: Any) -> str:
        """Return a pod's cgroup as long as it is there; the module knows it by its id."""
        likely = self._paths.get(pod.cgroup) or cgroup.path_of(_text(pod.name))
        self._paths[pod.cgroup] = cgroup.find(pod.cgroup, likely) or ""
        return self._paths[pod.cgroup]


def _part(part: PodPlan, ident: int, first_window: int) -> dict[str, int]:
    gated = part.windows is not None
    return {
        "pod": ident,
        "timeslice_us": part.timeslice_us,
        "pod_class": _CLASSES[part.pod_class],
        "flags": NUMBERS["QGPU_POD_PLAN_GATED"] if gated else 0,
        "first_window": first_window if gated else 0,
        "nr_windows": len(part.windows or ()),
    }


def _grant_of(device: Device, pod: int, card: Card) -> Grant | None:
    """Ask for a pod's grant on a card; None where it has none, or is gone."""
    try:
        grant = device.call("GRANT_GET", pod=pod, gpu=card.number)
    except FileNotFoundError:
        return None
    pod_class = PodClass.ONLINE if grant.pod_class == _CLASSES[PodClass.ONLINE] else PodClass.OFFLINE
    return Grant(pod_class, grant.cores or None, grant.memory or None, grant.latency_target_ns or None)


def _difference(ref: TsgRef, before: Used | None, now: Used | None) -> TsgSample:
    before, now = before or Used(), now or Used()
    run_ns, starts = max(0, now.run_ns - before.run_ns), max(0, now.starts - before.starts)
    return TsgSample(f"{ref.client:x}/{ref.handle:x}", run_ns, starts, now.resident, now.runs)


def _trouble(pod: Any) -> str:
    said = []
    if pod.flags & NUMBERS["QGPU_POD_LATE"]:
        said.append("it opened the GPU before qgpu knew it; that work is not held to its grant")
    if pod.flags & NUMBERS["QGPU_POD_TAMPERED"]:
        said.append("it changed calls while they were checked")
    if pod.refused_allocs:
        said.append(f"memory refused {pod.refused_allocs} times")
    if pod.refused_controls:
        said.append(f"scheduling controls refused {pod.refused_controls} times")
    return "; ".join(said)


def _text(value: Any) -> str:
    text = ffi.string(value)
    assert isinstance(text, bytes)
    return text.decode()
