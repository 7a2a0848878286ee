"""The record of a load: what it has done so far, and when it is over.

Only kernels count that finish between start and end of the measurement. Times are CLOCK_MONOTONIC ns; run.py and
simulated.py report what finished when.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from qgpu.load.stats import summary
from qgpu.load.workload import Workload
from qgpu.model import NS_PER_MS, NS_PER_S

_HOP_NS = 20_000_000
#: A sleep can be late by up to this much, so the last part of a wait is a busy loop.
_AWAKE_NS = 150_000


@dataclass(slots=True)
class Stop:
    """Set by a signal: end the load and print the result."""

    asked: bool = False

    def wait_until(self, at_ns: int) -> bool:
        """Wait until ``at_ns``, exact to the microsecond; False if stopped meanwhile."""
        while not self.asked and (left_ns := at_ns - time.perf_counter_ns()) > 0:
            if left_ns > _AWAKE_NS:
                time.sleep(min(left_ns - _AWAKE_NS, _HOP_NS) / NS_PER_S)
        return not self.asked


@dataclass(slots=True)
class Record:
    """The measured part of one load: from ``start_ns`` for the workload's duration and count."""

    work: Workload
    start_ns: int
    stop: Stop
    window_ns: int = NS_PER_S // 10
    kernels: int = 0
    last_ns: int = 0
    #: Called once a second with the seconds since the start, the kernels of that second, and their latency summary.
    watch: Callable[[float, int, dict[str, float] | None], None] | None = None
    #: How often a flood found its queue empty, and the longest time since its previous check.
    dry: int = 0
    dry_ns: int = 0
    _seen: tuple[int, int, int] = (0, 0, 0)
    _windows: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    _latencies_us: array[float] = field(default_factory=lambda: array("d"))

    def going(self, now_ns: int) -> bool:
        """Tell whether the load goes on."""
        self.last_ns = now_ns
        if self.watch is not None and now_ns >= max(self._seen[0], self.start_ns) + NS_PER_S:
            self.watch(
                (now_ns - self.start_ns) / NS_PER_S,
                self.kernels - self._seen[1],
                summary(self._latencies_us[self._seen[2] :]),
            )
            self._seen = (now_ns, self.kernels, len(self._latencies_us))
        if self.stop.asked or (self.work.count and self.kernels >= self.work.count):
            return False
        return not self.work.duration_s or now_ns < self.start_ns + self.work.duration_s * NS_PER_S

    def done(self, now_ns: int, kernels: int, latencies_us: Iterable[float] = ()) -> None:
        """Count ``kernels`` that finished at ``now_ns``, unless that is before the start."""
        if now_ns < self.start_ns:
            return
        if self.work.count:
            kernels = min(kernels, self.work.count - self.kernels)
        self.last_ns = now_ns
        self.kernels += kernels
        self._windows[(now_ns - self.start_ns) // self.window_ns] += kernels
        self._latencies_us.extend(latencies_us)

    def ran_dry(self, away_ns: int) -> None:
        """Note that the card had run out of work when the host checked, ``away_ns`` after its previous check."""
        self.dry += 1
        self.dry_ns = max(self.dry_ns, away_ns)

    def report(self) -> dict[str, object]:
        """Return the measurement as qgpu-load prints it."""
        elapsed_ns = max(0, self.last_ns - self.start_ns)
        windows = max(-(-elapsed_ns // self.window_ns), max(self._windows, default=-1) + 1)
        ended_ns = time.time_ns() - (time.perf_counter_ns() - self.last_ns)
        return {
            "elapsed_s": elapsed_ns / NS_PER_S,
            "kernels": self.kernels,
            "kernels_per_s": self.kernels * NS_PER_S / elapsed_ns if elapsed_ns else 0.0,
            "latency_us": summary(self._latencies_us),
            "dry": self.dry,
            "dry_longest_ms": self.dry_ns / NS_PER_MS,
            "started_ns": ended_ns - elapsed_ns,
            "ended_ns": ended_ns,
            "windows": [[round(n * self.window_ns / NS_PER_S, 6), self._windows.get(n, 0)] for n in range(windows)],
        }
