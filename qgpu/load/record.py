"""What a load has done so far, and when it is over.

Decides which kernels count: those that finish between the start and the end of measuring. Times are
CLOCK_MONOTONIC ns; run.py and simulated.py say what finished when.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from qgpu.load.spec import Workload
from qgpu.load.stats import summary
from qgpu.model import NS_PER_MS, NS_PER_S

_HOP_NS = 20_000_000
#: Sleeping is late by up to this much; what is left is spent awake.
_AWAKE_NS = 150_000


@dataclass(slots=True)
class Stop:
    """Set by a signal: finish and print."""

    asked: bool = False

    def wait_until(self, at_ns: int) -> bool:
        """Wait until ``at_ns``, to the microsecond; False if asked to stop meanwhile."""
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
    #: Told once a second what was done in it: seconds since the start, kernels, and the summary of latencies.
    watch: Callable[[float, int, dict[str, float] | None], None] | None = None
    #: How often a flood found its queue empty, and how long it had not looked then at most.
    dry: int = 0
    dry_ns: int = 0
    _seen: tuple[int, int, int] = (0, 0, 0)
    _windows: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    _latencies_us: array[float] = field(default_factory=lambda: array("d"))

    def going(self, now_ns: int) -> bool:
        """Tell whether there is more to do."""
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
        """Note that ``kernels`` finished at ``now_ns``; those from before the start do not count."""
        if now_ns < self.start_ns:
            return
        if self.work.count:
            kernels = min(kernels, self.work.count - self.kernels)
        self.last_ns = now_ns
        self.kernels += kernels
        self._windows[(now_ns - self.start_ns) // self.window_ns] += kernels
        self._latencies_us.extend(latencies_us)

    def ran_dry(self, away_ns: int) -> None:
        """Note that the card had nothing left to do when the host, after ``away_ns``, came to look."""
        self.dry += 1
        self.dry_ns = max(self.dry_ns, away_ns)

    def report(self) -> dict[str, object]:
        """Return what was measured, as qgpu-load prints it."""
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
