"""Two pods that start, change and end: on the real plane, or on a simulated card in virtual time.

This file decides only how a change is made and when it counts as made. Virtual time is for the simulator: the sleep of
a busy host is late by a few milliseconds, which would hide the effects. So there the daemon's loop runs in this
process.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence

from harness import Bench
from pods import Pod
from progress import Progress
from usage import Tick, watch

from qgpu.load.workload import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, Grant
from qgpu.planes.sim.host import SimHost
from qgpu.policies.registry import compose
from qgpu.sched import loop
from qgpu.sched.ledger import Ledger

_PERIOD_NS = 100 * NS_PER_MS
_WINDOW_NS = 10 * NS_PER_MS


class LiveTestbed:
    """Pods of a running daemon, in real time."""

    def __init__(self, bench: Bench, options: Sequence[str]) -> None:
        self._bench = bench
        self._options = options
        self._pods: dict[str, Pod] = {}

    def start(self, name: str, cores: int) -> None:
        """Start a pod and wait until its load has run for a second; beside a busy pod CUDA starts slowly."""
        self._pods[name] = self._bench.pod(name, *self._options, "--watch", cores=cores)
        self._pods[name].wait_log('"elapsed_s"')

    def stop(self, name: str) -> Progress:
        """Stop a pod and return its result."""
        return self._pods.pop(name).stop()

    def change(self, make: Callable[[], None]) -> float:
        """Make a change and return when (s)."""
        at = time.time()
        make()
        return at

    def quota(self, name: str, cores: int) -> None:
        """Change a pod's quota."""
        self._bench.ask("pod.set", name=name, cores=cores)

    def policy(self, name: str) -> None:
        """Change the policy."""
        self._bench.ask("gpu.set", gpu=0, policy=name)

    def hold(self, seconds: float) -> float:
        """Wait, and return the time."""
        time.sleep(seconds)
        return time.time()

    def watch(self, seconds: float) -> list[Tick]:
        """Wait, and return the ledger's ticks in that time."""
        return watch(self._bench, seconds)


class SimulatedTestbed:
    """Pods on a simulated card in virtual time."""

    def __init__(self, work: Workload) -> None:
        self._host = SimHost()
        self._backend = self._host.backend(0)
        self._ledger = Ledger(0)
        self._policy = "burst-share"
        self._work = work
        self._loads: dict[str, int] = {}
        self._counts: dict[str, list[tuple[int, int]]] = {}
        self._random = random.Random(1)  # noqa: S311 (when a change falls in a period, not a secret)

    def start(self, name: str, cores: int) -> None:
        """Start a pod at a random moment of the coming period."""

        def come() -> None:
            self._host.admit(name, {0: Grant(cores=cores)})
            self._loads[name] = self._host.start_load(name, 0, self._work)
            self._counts[name] = [(self._backend.now_ns, 0)]
            self._count(name)

        self.change(come)

    def stop(self, name: str) -> Progress:
        """Stop a pod and return its result."""
        self._host.stop_load(self._loads.pop(name))
        self._host.retire(name)
        counts = self._counts.pop(name)
        started_ns = counts[0][0]
        windows = [
            [(at_ns - _WINDOW_NS - started_ns) / NS_PER_S, kernels - before]
            for (_, before), (at_ns, kernels) in itertools.pairwise(counts)
        ]
        return Progress({"started_ns": started_ns, "ended_ns": self._backend.now_ns, "windows": windows})

    def change(self, make: Callable[[], None]) -> float:
        """Make a change at a random moment of the coming period, as an operator would, and return when (s)."""
        at_ns = self._backend.now_ns + self._random.randrange(_PERIOD_NS)
        self._host.call_at(0, at_ns, make)
        return at_ns / NS_PER_S

    def quota(self, name: str, cores: int) -> None:
        """Change a pod's quota."""
        self._host.amend(name, {0: Grant(cores=cores)})

    def policy(self, name: str) -> None:
        """Change the policy."""
        self._policy = name

    def hold(self, seconds: float) -> float:
        """Wait, and return the time."""
        self.watch(seconds)
        return self._backend.now_ns / NS_PER_S

    def watch(self, seconds: float) -> list[Tick]:
        """Wait, and return the ledger's ticks in that time."""
        until_ns = self._backend.now_ns + round(seconds * NS_PER_S)
        ticks = []
        while self._backend.now_ns < until_ns:
            settings = loop.Settings(compose(self._policy, "best-effort"), _PERIOD_NS)
            self._ledger = loop.tick(self._backend, settings, self._ledger)
            used_ns = {name: account.used_ns for name, account in self._ledger.accounts.items()}
            ticks.append(Tick(self._ledger.now_ns or 0, used_ns))
        return ticks

    def _count(self, name: str) -> None:
        if name in self._loads:
            kernels = self._host.progress(self._loads[name]).kernels
            now_ns = self._backend.now_ns
            if now_ns > self._counts[name][-1][0]:
                self._counts[name].append((now_ns, kernels))
            self._host.call_at(0, now_ns + _WINDOW_NS, lambda: self._count(name))


Testbed = LiveTestbed | SimulatedTestbed


def share(parts: Mapping[str, Progress], name: str, start: float, end: float) -> float:
    """Return one pod's part of the kernels that finished between two times; nan if there were none."""
    counts = {pod: progress.between(start, end) for pod, progress in parts.items()}
    return counts[name] / sum(counts.values()) if sum(counts.values()) else math.nan
