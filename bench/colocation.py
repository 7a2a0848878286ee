"""(d) What qgpu costs: a pod alone beside the same process without it, and the total of two pods, by the defaults.

    python bench/colocation.py

Nothing is configured: no quota, no policy, no period. The same loads under plain sharing are the comparison.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import alone
from figures import NOTHING, Asked, Figure, at_least, median
from plots import Plot
from pods import stop_all
from rivals import QGPU, Way, in_every_way
from script import Script, claim, listed, spread

TOTAL = 0.98
LOADS: Mapping[str, tuple[str, ...]] = {
    "50us": ("50us",),
    "1ms": ("1ms",),
    "100ms": ("100ms",),
    "batches": ("1ms", "--batch", "5", "--gap", "50us"),
}
#: The loads that rivals are measured with.
BESIDE = ("1ms", "batches")
_TURNS = 4


def measure(script: Script) -> list[Figure]:
    """Measure alone, then pairs in every way to share."""
    figures = [] if script.bench.simulated else [alone.ratio(list(alone.in_turn(script, _TURNS)))]
    totals = in_every_way(script, _totals)
    lines = {name: [spread(load, found) for load, found in each.items()] for name, each in totals.items()}
    script.plots.append(Plot("two pods with no settings at all", "", "both over one alone", lines, (TOTAL,)))
    for name, each in totals.items():
        least = [statistics.median(found) for found in each.values()]
        poorest = min(each, key=lambda load: statistics.median(each[load]))
        ours = name == QGPU
        tag = "" if ours else f"_{name.lower()}"
        limit: Asked = at_least(TOTAL) if ours else NOTHING
        note = f"{name}, no settings; both over one alone; least: {poorest}"
        figures.append(median(f"pair_total{tag}", least, *limit, note=note, pick=min))
        figures += [median(f"pair_total{tag}_{load}", found, *limit, note=name) for load, found in each.items()]
    return figures


def _totals(way: Way) -> dict[str, list[float]]:
    totals = {}
    for load in LOADS if way.name == QGPU else BESIDE:
        totals[load] = _pair(way, load)
        way.script.say(f"{way.name}: two of {load}: total {listed(totals[load])}")
    return totals


def _pair(way: Way, load: str) -> list[float]:
    kernel, *options = LOADS[load]
    a = way.start("a", kernel, *options)
    way.running(a)
    longer = 3.0 if kernel == "100ms" else 1.0  # few of them end in a second
    single = way.script.span(1.0 * longer)
    b = way.start("b", kernel, *options)
    way.running(b)
    spans = [way.script.span(1.3 * longer) for _ in range(2 if way.name == QGPU else 1)]
    done = stop_all(a, b)
    return [sum(each.rate(span) for each in done) / done[0].rate(single) for span in spans]


SECTIONS = {"colocation": measure}

if __name__ == "__main__":
    claim(SECTIONS, __doc__)
