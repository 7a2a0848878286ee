"""What settling a round is about: what each pod did in it, and where it stands after it.

Values only: what pods owe is reckoned in ``qgpu.sched.settle``, what their turns tell of them in ``qgpu.sched.pace``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from qgpu.model import Grant, Pace, PodPlan

# Named tuples, not frozen dataclasses: the loop makes several of each for every pod and tick, at a third of the price.


class Use(NamedTuple):
    """What a pod did in a stretch of time: GPU time, how often it was switched in, for how long its gate was open."""

    run_ns: int = 0
    #: A fraction where older turns weigh less.
    starts: float = 0
    open_ns: int = 0
    passed_ns: int = 0


NOTHING = Use()


class Standing(NamedTuple):
    """Where a pod stands: its debt, its pace, and what its turns were like of late."""

    debt_ns: int = 0
    pace: Pace = Pace.STEADY
    #: It was sparse once and then steady: the next time it stays sparse, so that it can't go back and forth.
    reformed: bool = False
    #: It came short too when another was doubted: its turn to be doubted comes before anybody takes turns by gate.
    suspect: bool = False
    #: How often it was found sparse.
    found: int = 0
    #: It is taken for gappy though it was not seen to leave its turns early, and may be acquitted.
    unproven: bool = False
    #: It was acquitted of that once: what is found the next time stands.
    acquitted: bool = False
    #: Of a sparse one, for how long it has been there for its turns since, on a full card; of one unproven, for how
    #: long it has taken turns by gate.
    there_ns: int = 0
    #: What it had beyond its part in the last round, not yet counted; None where that round doesn't count.
    pending_ns: int | None = None
    #: How long all rounds were that its debt was counted in, that one included.
    counted_ns: int = 0
    #: What its turns were like of late, older ones weighing less; ``open_ns`` is all time they were seen in.
    turns: Use = NOTHING

    @property
    def anew(self) -> Standing:
        """Return what stays of it when other terms begin: what was learnt of the pod, but nothing that was owed."""
        return Standing(
            pace=self.pace,
            reformed=self.reformed,
            suspect=self.suspect,
            found=self.found,
            unproven=self.unproven,
            acquitted=self.acquitted,
        )


class Entry(NamedTuple):
    """One pod in a round that is over: its part of the plan (None: there was none), and how many TSGs were busy."""

    grant: Grant
    part: PodPlan | None
    use: Use
    standing: Standing
    busy_tsgs: int
    #: It has only just come: what it misses while its processes start tells nothing.
    starting: bool = False

    @property
    def weight(self) -> int:
        """Return its weight among its class; 0 where it is held to its quota."""
        return self.part.weight if self.part else 0

    @property
    def turns_ns(self) -> int | None:
        """Return how much of a period its own windows take; None without any."""
        if self.part is None or self.part.windows is None:
            return None
        return sum(window.end_ns - window.start_ns for window in self.part.windows)


def overruns(rivals: Mapping[str, Entry]) -> dict[str, int]:
    """Return what each had beyond its part, by weight, of what they had together."""
    used_ns = [entry.use.run_ns for entry in rivals.values()]
    weights = [entry.weight for entry in rivals.values()]
    together_ns, whole = sum(used_ns), sum(weights)
    return {
        name: own_ns - together_ns * weight // whole
        for name, own_ns, weight in zip(rivals, used_ns, weights, strict=True)
    }
