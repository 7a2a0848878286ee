"""What pods did in a round: the input of accounting and of the slice tuner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from qgpu.model import Grant, PodPlan

# Named tuples, not frozen dataclasses: they cost a third, and the loop makes several for every pod and tick.


class GpuUse(NamedTuple):
    """What a pod did over some time: its GPU time, how often it was switched in, how long its gate was open."""

    run_ns: int = 0
    starts: int = 0
    open_ns: int = 0
    #: The time itself.
    passed_ns: int = 0
    #: The longest of its turns.
    longest_ns: int = 0
    #: How much of its GPU time may lie in windows of others.
    ungated_ns: int = 0
    #: How many GPFIFO entries the card took from it; None: unknown.
    entries: int | None = None


NOTHING = GpuUse(entries=0)


def known_sum(a: int | None, b: int | None) -> int | None:
    """Add two counts; None if one is unknown."""
    return None if a is None or b is None else a + b


class RoundEntry(NamedTuple):
    """One pod in a finished round, with its part of the plan (None: the plan had no part for it)."""

    grant: Grant
    part: PodPlan | None
    use: GpuUse
    #: Its debt before this round: GPU time beyond (positive) or short of (negative) what plans aimed at.
    debt_ns: int
    busy_tsgs: int
    #: Its processes are just starting, so time it misses now gives it no credit.
    starting: bool = False

    @property
    def weight(self) -> int:
        """Return its weight among its class; 0 if its quota binds it instead."""
        return self.part.weight if self.part else 0


def overruns(rivals: Mapping[str, RoundEntry]) -> dict[str, int]:
    """Return in ns what each pod had beyond its part, by weight, of the GPU time they had together."""
    used_ns = [entry.use.run_ns for entry in rivals.values()]
    weights = [entry.weight for entry in rivals.values()]
    together_ns, whole = sum(used_ns), sum(weights)
    return {
        name: own_ns - together_ns * weight // whole
        for name, own_ns, weight in zip(rivals, used_ns, weights, strict=True)
    }
