"""The progress of a load, read afterwards: rates between two moments from its own counts. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time (s since the epoch), and the GPU time in ns that each pod got in it."""

    start: float
    end: float
    used_ns: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Progress:
    """The kernels that one load finished over time, from its own count per window."""

    result: Mapping[str, Any]

    def rate(self, span: Span) -> float:
        """Return kernels per second in a span of time.

        Pods take turns, and long kernels end rarely. So counts weigh less towards the ends of the span (a Hann window),
        and the phase at which the span cuts a turn or a kernel hardly matters.
        """
        length = span.end - span.start
        weighed = sum(
            kernels * math.sin(math.pi * (when - span.start) / length) ** 2
            for when, kernels in self.counts()
            if span.start < when < span.end
        )
        return weighed * 2 / length

    def between(self, start: float, end: float) -> int:
        """Count the kernels of the windows whose middles lie between two times (s since the epoch)."""
        return sum(kernels for when, kernels in self.counts() if start <= when < end)

    def launching_ms(self, span: Span) -> float:
        """Return how long the host took to launch one batch in a span of time; NaN if unknown."""
        started = self.result["started_ns"] / 1e9
        inside = [of for at, *of in self.result.get("launches", ()) if span.start < started + at < span.end]
        return ratio(sum(ms for ms, _ in inside), sum(batches for _, batches in inside))

    def counts(self) -> Iterator[tuple[float, int]]:
        """Yield the middle of each window (s since the epoch) and the kernels that finished in it."""
        windows = self.result["windows"]
        started = self.result["started_ns"] / 1e9
        half = windows[1][0] / 2 if len(windows) > 1 else 0.0
        for at, kernels in windows:
            yield started + at + half, kernels


def shares(done: Sequence[Progress], span: Span) -> list[float]:
    """Return the part that each load had of all kernels finished in a span."""
    rates = [progress.rate(span) for progress in done]
    return [rate / sum(rates) for rate in rates]


def ratio(a: float, b: float) -> float:
    """Return the ratio; NaN if it is undefined."""
    return a / b if b else math.nan
