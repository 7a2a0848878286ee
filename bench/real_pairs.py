"""Pairs of programs that share a card: their requirements, and the figures from what they did. Pure."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch_processes import SpanResult, StepStats

DEFAULT_PERIOD_MS = 100
BURST, FIXED, BEST_EFFORT = "burst-share", "fixed-share", "best-effort"
PLAIN, MPS_FREE, MPS_2_1 = "plain", "MPS", "MPS 66/33"


@dataclass(frozen=True, slots=True)
class Sharing:
    """A policy for two pods, and their quotas in per cent if it takes any."""

    name: str
    policy: str
    quotas: tuple[int | None, int] | None = None
    period_ms: int = DEFAULT_PERIOD_MS
    #: Whether the policy applies among online pods.
    online: bool = False

    @property
    def tag(self) -> str:
        """Return its name as a part of a figure's name."""
        return self.name.replace(" ", "_").replace("/", "_").replace("-", "_")

    @property
    def parts(self) -> tuple[float, float]:
        """Return the part of the card that each pod is guaranteed."""
        first, second = self.quotas or (50, 50)
        return (first or 0) / 100, second / 100

    @property
    def mps(self) -> str:
        """Name the MPS clients that come nearest to it."""
        return MPS_2_1 if self.quotas == (66, 33) else MPS_FREE


@dataclass(frozen=True, slots=True)
class Pair:
    """Two programs, one for each pod."""

    first: str
    second: str

    @property
    def name(self) -> str:
        """Return its name for people."""
        return f"{self.first} x2" if self.first == self.second else f"{self.first} + {self.second}"

    @property
    def tag(self) -> str:
        """Return its name as a part of a figure's name."""
        return self.name.replace(" + ", "_").replace(" ", "_").replace("-", "_")

    @property
    def programs(self) -> tuple[str, str]:
        """Return both."""
        return self.first, self.second


def twice(program: str) -> Pair:
    """Return the pair of a program and itself."""
    return Pair(program, program)


@dataclass(slots=True)
class Alone:
    """The results of each program alone, from time to time; its figures are medians over them."""

    spans: dict[str, list[SpanResult]] = field(default_factory=dict)

    def add(self, program: str, span: SpanResult) -> None:
        """Add the results of one span."""
        self.spans.setdefault(program, []).append(span)

    def speed(self, program: str) -> float:
        """Return steps per second."""
        return self._median(program, lambda span: span.processes[0].speed)

    def slowest_and_fastest(self, program: str) -> tuple[float, float]:
        """Return the least and the most steps per second of any span."""
        speeds = [span.processes[0].speed for span in self.spans[program]]
        return min(speeds), max(speeds)

    def median_ms(self, program: str) -> float:
        """Return the median time of a step."""
        return self._median(program, lambda span: span.processes[0].median_ms)

    def p99_ms(self, program: str) -> float:
        """Return the time that only one step in a hundred exceeds."""
        return self._median(program, lambda span: span.processes[0].p99_ms)

    def busy(self, program: str) -> float:
        """Return the part of time that the card is busy; NaN if unknown."""
        return self._median(program, lambda span: span.busy)

    def _median(self, program: str, of: Callable[[SpanResult], float]) -> float:
        return statistics.median(map(of, self.spans[program]))


@dataclass(slots=True)
class PairResult:
    """Spans of one pair: of ways to share, and plain ones before, between and after those of each way."""

    pair: Pair
    plain: dict[Sharing, list[SpanResult]] = field(default_factory=dict)
    shared: dict[Sharing, list[SpanResult]] = field(default_factory=dict)
    mps: dict[str, list[SpanResult]] = field(default_factory=dict)

    def relative(self, span: SpanResult, alone: Alone) -> list[float]:
        """Return the speed of each process over its speed alone."""
        pods = zip(span.processes, self.pair.programs, strict=True)
        return [each.speed / alone.speed(name) for each, name in pods]

    def totals(self, spans: Iterable[SpanResult], alone: Alone) -> list[float]:
        """Return, for each span, the sum of both."""
        return [sum(self.relative(span, alone)) for span in spans]

    def over_plain(self, sharing: Sharing, of: Callable[[SpanResult], float]) -> list[float]:
        """Return, for each round, ``of`` the span over the mean of ``of`` the plain spans on both sides."""
        plain = [of(span) for span in self.plain[sharing]]
        beside = map(statistics.fmean, pairwise(plain))
        return [of(span) / each for span, each in zip(self.shared[sharing], beside, strict=True)]

    def gained(self, sharing: Sharing, alone: Alone) -> list[float]:
        """Return, for each round, the sum of speeds over that of plain sharing."""
        return self.over_plain(sharing, lambda span: sum(self.relative(span, alone)))

    def plain_again(self, alone: Alone) -> list[float]:
        """Return, for each plain span between two others, its sum of speeds over theirs: 1 on a steady host."""
        found = []
        for spans in self.plain.values():
            sums = self.totals(spans, alone)
            found += [each / statistics.fmean(beside) for *beside, each in zip(sums, sums[2:], sums[1:], strict=False)]
        return found

    def floors(self, spans: Sequence[SpanResult], sharing: Sharing, alone: Alone) -> list[list[float]]:
        """Return, for each pod and span, its speed over the worth of its quota under ``sharing``; see ``floor``."""
        by_pod = zip(*(self.relative(each, alone) for each in spans), strict=True)
        pods = zip(by_pod, sharing.parts, self.pair.programs, strict=True)
        return [[floor(each, part, alone.busy(name)) for each in speeds] for speeds, part, name in pods]

    def ratios(self, sharing: Sharing, alone: Alone) -> list[float]:
        """Return, for each round, the first pod's speed over the other's, both relative to alone."""
        return [first / second for first, second in (self.relative(each, alone) for each in self.shared[sharing])]

    def ways(self) -> dict[str, list[SpanResult]]:
        """Return all spans by the way to share, rivals first."""
        plain = [span for spans in self.plain.values() for span in spans]
        return {PLAIN: plain, **self.mps, **{sharing.name: spans for sharing, spans in self.shared.items()}}


def floor(speed: float, part: float, busy: float) -> float:
    """Return a pod's speed (relative to alone) over what its part of the card allows.

    Alone it keeps the card busy for ``busy`` (0 to 1) of the time; NaN or 0 (unknown) counts as all of it.
    """
    return speed / min(1.0, part / busy if busy > 0 else part)


def least_by_chance(values: Sequence[float], ways: int, rounds: int, draws: int = 1000) -> list[float]:
    """Return, ``draws`` times, the least of ``ways`` medians of ``rounds`` values drawn from ``values``.

    If ``values`` differ only by noise, this is the effect of noise on a least median.
    """
    chosen = random.Random(ways)  # noqa: S311 - for figures
    return [min(statistics.median(chosen.choices(values, k=rounds)) for _ in range(ways)) for _ in range(draws)]


def farthest(values: Iterable[float], asked: float) -> float:
    """Return the value that is farthest from the requirement."""
    return max(values, key=lambda value: abs(value - asked))


def worst_p99_ms(span: SpanResult) -> float:
    """Return the p99 of the process with the longer one."""
    return max(each.p99_ms for each in span.processes)


def each_median(spans: Sequence[SpanResult], of: Callable[[StepStats], float]) -> list[float]:
    """Return, for each process, the median over spans of ``of`` its results."""
    columns = zip(*(span.processes for span in spans), strict=True)
    return [statistics.median(of(each) for each in column) for column in columns]


def row(section: str, found: PairResult, way: str, spans: Sequence[SpanResult], alone: Alone) -> dict[str, Any]:
    """Return the row of one pair in one way: medians over spans; speeds in steps/s and relative to alone."""
    relative = [statistics.median(column) for column in zip(*(found.relative(s, alone) for s in spans), strict=True)]
    told: dict[str, Any] = {
        "section": section,
        "pair": found.pair.name,
        "way": way,
        "steps_per_s": rounded(each_median(spans, lambda each: each.speed)),
        "over_alone": rounded(relative),
        "sum_over_alone": rounded([statistics.median(found.totals(spans, alone))])[0],
        "p99_ms": rounded(each_median(spans, lambda each: each.p99_ms)),
        "utilisation": rounded([statistics.median(span.busy for span in spans)])[0],
        "spans": len(spans),
    }
    return told


def rounded(values: Sequence[float]) -> list[float | None]:
    """Return values with four digits; None for what is not a number."""
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]
