"""What pods did in a round: the values that settling debts and judging contention are about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from qgpu.model import Grant, PodPlan

# Named tuples, not frozen dataclasses: the loop makes several of each for every pod and tick, at a third of the price.


class GpuUse(NamedTuple):
    """What a pod did in a stretch of time: GPU time, how often it was switched in, for how long its gate was open."""

    run_ns: int = 0
    starts: int = 0
    open_ns: int = 0
    passed_ns: int = 0
    #: The longest of its turns.
    longest_ns: int = 0


NOTHING = GpuUse()


class RoundEntry(NamedTuple):
    """One pod in a round that is over: its part of the plan (None: there was none), and how many TSGs were busy."""

    grant: Grant
    part: PodPlan | None
    use: GpuUse
    #: GPU time it had beyond (positive) or short of (negative) what it was meant to have, before this round.
    debt_ns: int
    busy_tsgs: int
    #: It has only just come: what it misses while its processes start tells nothing.
    starting: bool = False

    @property
    def weight(self) -> int:
        """Return its weight among its class; 0 where it is held to its quota."""
        return self.part.weight if self.part else 0


def overruns(rivals: Mapping[str, RoundEntry]) -> dict[str, int]:
    """Return what each had beyond its part, by weight, of what they had together."""
    used_ns = [entry.use.run_ns for entry in rivals.values()]
    weights = [entry.weight for entry in rivals.values()]
    together_ns, whole = sum(used_ns), sum(weights)
    return {
        name: own_ns - together_ns * weight // whole
        for name, own_ns, weight in zip(rivals, used_ns, weights, strict=True)
    }
