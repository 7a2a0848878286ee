"""A process on a simulated pGPU: turns a workload into launches, and launches into counts and latencies.

It decides when the host launches (closed loop, flood, periodic or trace); the engine decides when the card runs the
work. Kernels and latencies count from the end of the warm-up.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from qgpu.load.workload import Workload
from qgpu.model import NS_PER_S, NS_PER_US
from qgpu.model.checkpointer import ProcessState
from qgpu.planes.sim.engine import FOREVER_NS
from qgpu.planes.sim.gpu import SimGpu


@dataclass(frozen=True, slots=True)
class Progress:
    """What a load has done so far."""

    #: Kernels finished since the warm-up.
    kernels: int
    #: Latencies since the last call.
    latencies_us: tuple[float, ...]
    #: Time since the warm-up.
    elapsed_s: float
    #: Whether it has ended.
    done: bool
    #: GPU time since it began.
    gpu_ns: int


class Load:
    """One process of a pod from its start; the same seed gives the same run."""

    def __init__(self, gpu: SimGpu, pod: str, workload: Workload, seed: str) -> None:
        self.pod = pod
        self.workload = workload
        self._gpu = gpu
        self._random = random.Random(seed)  # noqa: S311 (jitter, not a secret)
        self._kernel_ns = max(1, round(workload.kernel_us * NS_PER_US))
        self._tsg = gpu.add_tsg(pod, self._finished)
        self._began_ns = gpu.now_ns
        self._warm_ns = gpu.now_ns + round(workload.warmup_s * NS_PER_S)
        self._useful_before_ns = 0
        self._launch_each_ns = round(workload.launch_us * NS_PER_US)
        #: Unfinished kernels of a batch that is launched one by one.
        self._unfinished = 0
        self._launched_ns: list[int] = []
        self._launched = 0
        self._traced = 0
        self._latencies_us: list[float] = []
        self._ended_ns: int | None = None
        #: While it is locked: what its host would have done meanwhile, and once it is off the card, its queued work.
        self._held: list[Callable[[], None]] | None = None
        self._queued: tuple[int, ...] | None = None
        gpu.at(self._warm_ns, self._warm)
        if workload.duration_s:
            gpu.at(self._warm_ns + round(workload.duration_s * NS_PER_S), self.stop)
        self._begin()

    @property
    def done(self) -> bool:
        """Tell whether it has ended."""
        return self._ended_ns is not None

    @property
    def useful_ns(self) -> int:
        """Return how long its kernels took on the engine since the warm-up, without switches."""
        return self._tsg.useful_ns - self._useful_before_ns

    @property
    def run_ns(self) -> int:
        """Return its time on the engine since it began."""
        return self._tsg.run_ns

    def progress(self) -> Progress:
        """Report progress, and forget the reported latencies."""
        latencies, self._latencies_us = tuple(self._latencies_us), []
        now_ns = self._gpu.now_ns if self._ended_ns is None else self._ended_ns
        return Progress(self.kernels, latencies, max(0, now_ns - self._warm_ns) / NS_PER_S, self.done, self.run_ns)

    @property
    def kernels(self) -> int:
        """Return how many kernels are done since the warm-up."""
        return self._traced if self.workload.trace else self.useful_ns // self._kernel_ns

    @property
    def pgpu(self) -> int:
        """Return the number of its pGPU."""
        return self._gpu.index

    @property
    def state(self) -> ProcessState:
        """Return its state in the driver."""
        if self._held is None:
            return ProcessState.RUNNING
        return ProcessState.LOCKED if self._queued is None else ProcessState.CHECKPOINTED

    @property
    def memory(self) -> int:
        """Return the bytes of the card that it holds now."""
        return 0 if self.done or self._queued is not None else self.workload.memory

    def lock(self) -> None:
        """Hold its launches."""
        if self._held is None:
            self._held = []

    def checkpoint(self) -> None:
        """Take it off the card while it is locked. What a real card would finish first is finished afterwards."""
        if self._queued is None and not self.done:
            self._queued = (self._tsg.left_ns, *self._tsg.queue) if self._tsg.left_ns else ()
            self._gpu.remove_tsg(self._tsg)

    def move(self, gpu: SimGpu) -> None:
        """Let it come back on another pGPU, where its pod has a grant, while it is off its own."""
        if self._queued is not None:
            self._gpu = gpu
            self._tsg.gate = gpu.pods[self.pod]

    def restore(self) -> None:
        """Put it back, locked."""
        if self._queued is not None and not self.done:
            self._gpu.put_back(self._tsg)
            for work_ns in self._queued:
                self._tsg.launch(work_ns)
            self._queued = None

    def unlock(self) -> None:
        """Let it go on with what it would have done meanwhile."""
        held, self._held = self._held or [], None
        for call in held:
            self._gpu.at(self._gpu.now_ns, call)

    def stop(self) -> None:
        """End the process and drop its queued work. Safe to call twice."""
        if self._ended_ns is None:
            self._ended_ns = self._gpu.now_ns
            if self._queued is None:
                self._gpu.remove_tsg(self._tsg)

    def _wait(self, call: Callable[[], None]) -> bool:
        """Keep ``call`` for later while the process is locked; tell whether it is."""
        if self._held is not None:
            self._held.append(call)
        return self._held is not None

    def _begin(self) -> None:
        load = self.workload
        if load.trace:
            for at_us, kernel_us in load.trace:
                work_ns = max(1, round(kernel_us * NS_PER_US))
                self._gpu.at(self._began_ns + round(at_us * NS_PER_US), partial(self._launch, work_ns))
        elif load.batch == 0:
            self._tsg.launch(FOREVER_NS)
        else:
            self._gpu.at(self._began_ns + self._late(), self._next_batch)

    def _warm(self) -> None:
        """Start counting; a flood with a count of kernels gets its length here."""
        if self._ended_ns is not None or self._wait(self._warm):
            return
        self._useful_before_ns = self._tsg.useful_ns
        self._latencies_us.clear()
        self._launched = 0
        if self.workload.count and self.workload.batch == 0 and not self.workload.trace:
            self._tsg.left_ns = self.workload.count * self._kernel_ns

    def _next_batch(self) -> None:
        if self._wait(self._next_batch):
            return
        load = self.workload
        kernels = min(load.batch, load.count - self._launched) if load.count else load.batch
        self._launched += kernels
        if self.workload.launch_us:
            self._launched_ns.append(self._gpu.now_ns)
            self._unfinished = kernels
            self._launch_one(kernels)
        else:
            self._launch(kernels * self._kernel_ns)

    def _launch_one(self, left: int) -> None:
        """Launch one kernel after the other without waiting for the card; the host waits only for the last."""
        if self._ended_ns is not None or self._wait(partial(self._launch_one, left)):
            return
        self._gpu.at(self._gpu.now_ns + self._gpu.hardware.launch_ns, partial(self._arrive, self._kernel_ns))
        if left > 1:
            self._gpu.at(self._gpu.now_ns + self._launch_each_ns, partial(self._launch_one, left - 1))

    def _launch(self, work_ns: int) -> None:
        if self._ended_ns is not None or self._wait(partial(self._launch, work_ns)):
            return
        self._launched_ns.append(self._gpu.now_ns)
        self._gpu.at(self._gpu.now_ns + self._gpu.hardware.launch_ns, partial(self._arrive, work_ns))

    def _arrive(self, work_ns: int) -> None:
        if self._ended_ns is None and not self._wait(partial(self._arrive, work_ns)):
            self._tsg.launch(work_ns)

    def _finished(self, now_ns: int) -> None:
        cost = self._gpu.hardware
        self._unfinished -= 1
        if self._unfinished > 0:
            return
        seen_ns = now_ns + cost.notice_ns + round(self._random.expovariate(1.0) * cost.jitter_ns)
        self._gpu.at(seen_ns, self._seen)

    def _seen(self) -> None:
        """Let the host notice that its oldest launch is done, and continue."""
        load, now_ns = self.workload, self._gpu.now_ns
        if self._ended_ns is not None or self._wait(self._seen):
            return
        if self._launched_ns:
            launched_ns = self._launched_ns.pop(0)
            if launched_ns >= self._warm_ns:
                self._latencies_us.append((now_ns - launched_ns) / NS_PER_US)
        if load.trace:
            self._traced += 1
            if self._traced == len(load.trace):
                self.stop()
        elif load.batch == 0 or (load.count and self._launched >= load.count):
            self.stop()
        elif load.period_us:
            self._gpu.at(self._due(now_ns), self._next_batch)
        else:
            self._gpu.at(now_ns + round(load.gap_us * NS_PER_US), self._next_batch)

    def _due(self, now_ns: int) -> int:
        """Return when the next period begins; a batch that took longer than its period skips the missed ones."""
        period_ns = round(self.workload.period_us * NS_PER_US)
        periods = (now_ns - self._began_ns) // period_ns + 1
        return self._began_ns + periods * period_ns + self._late()

    def _late(self) -> int:
        """Return how late a sleeping host thread wakes up."""
        return self._random.randrange(self._gpu.hardware.late_ns + 1)
