"""(e) How soon shares are right after a pod arrives or ends, or a quota or the policy changes.

    python bench/convergence.py

Shares come from the kernels that the pods finished, over a sliding period. The result is the time from the change to
the beginning of the first period from which on every period's share is within 5 points of the required one. A change
counts from the moment the daemon was asked; an arrival from the first kernel, an end from the last. Measured with two
floods, and with two pods that wait for batches of 5 ms. The tuner must first recognize the latter, so every arrival
uses fresh pods of which nothing is known yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from figures import Figure, at_most, median
from plots import Plot
from progress import Progress
from script import Script, claim, listed
from testbed import LiveTestbed, SimulatedTestbed, Testbed, share

from qgpu.load.workload import Workload

PERIOD_S = 0.1
OFF = 0.05
PERIODS, MOST_MS = 3, 500
_STEP_S = 0.01
_REPEATS, _HOLD_S = 3, 0.9
_FINE = ("--window", "10ms")
_LOADS: Mapping[str, tuple[str, ...]] = {
    "floods": ("50us", *_FINE),
    "batches": ("1ms", "--batch", "5", "--gap", "50us", *_FINE),
}


_SIMULATED = {"floods": Workload(kernel_us=50, batch=0), "batches": Workload(kernel_us=1000, batch=5, gap_us=50)}


@dataclass(frozen=True, slots=True)
class Change:
    """When a change was made (s since the epoch), the first pod's required share from then on, and until when."""

    what: str
    at: float
    share: float
    until: float


@dataclass(frozen=True, slots=True)
class Round:
    """Two pods from start to end: the changes, and what the pods did."""

    changes: Sequence[Change]
    a: Progress
    b: Progress


def measure(script: Script) -> list[Figure]:
    """Make every change a few times with floods, and with pods that wait for batches."""
    took: dict[str, dict[str, list[float]]] = {}
    for load in _LOADS:
        rounds = _simulated(load) if script.bench.simulated else _live(script, load)
        took[load] = {}
        for each in rounds:
            for change in each.changes:
                took[load].setdefault(change.what, []).append(took_s(each.a, each.b, change) * 1000)
        slowest = max(rounds, key=lambda each: took_s(each.a, each.b, each.changes[0]))
        script.plots.append(_plot(load, slowest))
        for what, found in took[load].items():
            script.say(f"{load}: {what}: {listed(found)} ms")
    lines = {
        load: [(what, max(found), min(found), max(found)) for what, found in each.items()]
        for load, each in took.items()
    }
    script.plots.append(Plot("from a change to the right shares, worst", "", "ms", lines, (MOST_MS,)))
    return _figures(took)


def _live(script: Script, load: str) -> list[Round]:
    kernel, *options = _LOADS[load]
    with script.bench.daemon():
        testbed = LiveTestbed(script.bench, (kernel, *options))
        return [_round(testbed, _HOLD_S) for _ in range(_REPEATS)]


def _simulated(load: str) -> list[Round]:
    testbed = SimulatedTestbed(_SIMULATED[load])
    return [_round(testbed, 2.0) for _ in range(10)]


def _round(testbed: Testbed, hold_s: float) -> Round:
    """Let two pods come, change everything, and let them go."""
    changes = []

    def change(what: str, share: float, make: Callable[[], None]) -> None:
        at = testbed.change(make)
        changes.append(Change(what, at, share, testbed.hold(hold_s)))

    def quotas(**cores: int) -> None:
        for name, quota in cores.items():
            testbed.quota(name, quota)

    def back() -> None:
        quotas(b=30, a=60)
        testbed.policy("best-effort")

    testbed.start("a", 60)
    testbed.hold(0.5)
    testbed.start("b", 30)
    come = testbed.hold(hold_s)
    change("quotas", 1 / 3, lambda: quotas(a=30, b=60))
    change("best-effort", 1 / 2, lambda: testbed.policy("best-effort"))
    change("fixed-share", 1 / 3, lambda: testbed.policy("fixed-share"))
    change("best-effort", 1 / 2, back)
    change("burst-share", 2 / 3, lambda: testbed.policy("burst-share"))
    b = testbed.stop("b")
    left = testbed.hold(hold_s)
    a = testbed.stop("a")
    arrived = Change("arrival", b.result["started_ns"] / 1e9, 2 / 3, come)
    ended = Change("end", b.result["ended_ns"] / 1e9, 1.0, left)
    return Round((arrived, *changes, ended), a, b)


def took_s(a: Progress, b: Progress, change: Change) -> float:
    """Return the time from a change until shares are right and stay right; the whole stretch if they never are."""
    # At the very end of a stretch the next change has begun.
    steps = int((change.until - change.at - PERIOD_S) / _STEP_S) - 1
    right: int | None = None
    for step in range(steps):
        at = change.at + step * _STEP_S
        off = abs(share({"a": a, "b": b}, "a", at, at + PERIOD_S) - change.share)
        if not off <= OFF:  # a period without kernels has no share, and is not right either
            right = None
        elif right is None:
            right = step
    return change.until - change.at if right is None else right * _STEP_S


def _plot(load: str, shown: Round) -> Plot:
    changes, a, b = shown.changes, shown.a, shown.b
    start, end = changes[0].at - 0.3, changes[-1].until
    times = [start + step * 0.02 for step in range(int((end - start - PERIOD_S) / 0.02))]
    shares = [
        (round(at + PERIOD_S - changes[0].at, 3), round(share({"a": a, "b": b}, "a", at, at + PERIOD_S), 4))
        for at in times
    ]
    asked = [(round(t - changes[0].at, 3), c.share) for c in changes for t in (c.at, c.until)]
    marks = [(round(change.at - changes[0].at, 3), change.what) for change in changes]
    return Plot(
        f"two {load}: the first pod's share over the last 100 ms",
        "seconds",
        "share of kernels finished",
        {"got": [point for point in shares if not math.isnan(point[1])], "asked": asked},
        marks=marks,
    )


def _figures(took: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Figure]:
    every = {f"{load}: {what}": found for load, each in took.items() for what, found in each.items()}
    worst = max(every, key=lambda name: max(every[name]))
    ms = [each for found in every.values() for each in found]
    note = f"worst of all changes and repeats: {worst}; until every period's share is within {OFF * 100:.0f} points"
    figures = [
        median("converge_ms", ms, *at_most(MOST_MS, " ms"), note=note, pick=max),
        median(
            "converge_periods",
            [each / PERIOD_S / 1000 for each in ms],
            *at_most(PERIODS),
            note="the same in periods",
            pick=max,
        ),
    ]
    for name, found in every.items():
        short = name.replace(": ", "_").replace("-", "_")
        figures.append(median(f"converge_ms_{short}", found, *at_most(MOST_MS, " ms"), note=name, pick=max))
    return figures


SECTIONS = {"convergence": measure}

if __name__ == "__main__":
    claim(SECTIONS, __doc__)
