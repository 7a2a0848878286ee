"""Whether fixed slices could serve the mixes of random_mixes.py that miss a floor, or idle, under Burst Share.

    python bench/best_slices.py --mixes 200           # some ten minutes on two cores

For each such mix a search changes one pod's slice after the other, from 0.1 to 32 ms. It looks for slices that leave no
pod more than a point below its floor (or, if Burst Share idles, no further below than Burst Share does). Among those it
looks for the slices that do most work. The search is local, so it may overlook some. Its slices stay fixed, and it
knows each pod's work exactly; a control law knows neither in advance.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import Figure, RunInfo, median, write
from provenance import sources
from random_mixes import Mix, draw, measure, missed, run

from qgpu.model import Plan, PodPlan, Policy, Snapshot

_ROOT = Path(__file__).resolve().parent.parent
#: Fixed slices act at once.
_SETTLE_S = 1
_SLICES_US = (100, 250, 500, 1000, 2000, 4000, 8000, 16_000, 32_000)
#: The rounds in which the search begins, with slices in the ratio of quotas.
_ROUNDS_US = (4000, 16_000)
_POINT = 0.01
_IDLE = 0.03
#: A change must improve the worst pod, or the total, by this part of the card.
_BETTER = 0.001


class Served(NamedTuple):
    """How well slices serve a mix, by two parts of the card's time: less is better, the first before the second.

    ``beyond`` is how much further the worst pod is below its floor than it may be. ``lost`` is the time in which no pod
    works.
    """

    beyond: float
    lost: float


class MixResult(NamedTuple):
    """One mix under Burst Share and with the best slices found."""

    ours: Mix
    best: Served


def look(seed: int) -> MixResult | None:
    """Measure a mix; where it misses a floor or idles, search for slices that serve it better."""
    ours = measure(seed)
    if ours.missed <= _POINT and ours.idle <= _IDLE:
        return None
    pods, _ = draw(seed)
    allowed = _POINT if ours.missed > _POINT else max(ours.missed, 0.0)
    known: dict[tuple[int, ...], Served] = {}

    def serve(at: tuple[int, ...]) -> Served:
        if at not in known:
            slices_us = {pod.name: _SLICES_US[index] for pod, index in zip(pods, at, strict=True)}
            work, _ = run(_fixed(slices_us), pods, seed, settle_s=_SETTLE_S)
            known[at] = Served(max(0.0, missed(ours.floors, work) - allowed), 1 - sum(work.values()))
        return known[at]

    for round_us in _ROUNDS_US:
        at: tuple[int, ...] | None = tuple(_nearest(round_us * (pod.cores or 5) / 100) for pod in pods)
        while at is not None:
            at = _better(at, serve)
    return MixResult(ours, min(known.values()))


def _nearest(slice_us: float) -> int:
    return min(range(len(_SLICES_US)), key=lambda index: abs(_SLICES_US[index] - slice_us))


def _better(at: tuple[int, ...], serve: Callable[[tuple[int, ...]], Served]) -> tuple[int, ...] | None:
    """Return the first move of one slice that serves the mix better, or None."""
    now = serve(at)
    for place, by in product(range(len(at)), (-1, 1, -2, 2)):
        if not 0 <= at[place] + by < len(_SLICES_US):
            continue
        moved = (*at[:place], at[place] + by, *at[place + 1 :])
        then = serve(moved)
        if (now.beyond - then.beyond or now.lost - then.lost) > _BETTER:
            return moved
    return None


def _fixed(slices_us: Mapping[str, int]) -> Policy:
    """Return a policy that gives each pod its own slice, always."""

    def policy(snapshot: Snapshot) -> Plan:
        parts = (PodPlan(pod.name, pod.grant.pod_class, slices_us[pod.name]) for pod in snapshot.pods)
        return Plan(snapshot.pgpu, snapshot.period_ns, tuple(parts))

    return policy


def figures(mixes: int, found: Sequence[MixResult]) -> list[Figure]:
    """Return the figures of the mixes that were searched, of ``mixes`` in all."""
    missing = [each for each in found if each.ours.missed > _POINT]
    idle = [each for each in found if each.ours.idle > _IDLE]
    return [
        median("mixes", [mixes], note="drawn"),
        median("floor_misses", [len(missing)], note="some pod is more than a point of the card below its floor"),
        *_served(missing, "floor_misses_of_best_slices", "best_slices_total_over_ours"),
        median("idle_mixes", [len(idle)], note="more than 3 % of the card idles although pods could use it"),
        *_served(idle, "idle_mixes_unserved", "idle_best_slices_total_over_ours"),
    ]


def _served(mixes: Sequence[MixResult], unserved: str, total: str) -> list[Figure]:
    """Return for how many mixes no slices were found, and the work of all pods with those found for the others."""
    totals = [(1 - each.best.lost) / each.ours.work for each in mixes if each.best.beyond == 0]
    count = median(unserved, [len(mixes) - len(totals)], note="no slices were found that serve it")
    note = "the others: work of all pods with the slices found, over that under Burst Share"
    return [count, median(total, totals, note=note)] if totals else [count]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", type=int, default=200)
    parser.add_argument("--out", type=Path, default=_ROOT / "docs" / "results")
    options = parser.parse_args()
    began = time.monotonic()
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        found = [each for each in workers.map(look, range(options.mixes)) if each is not None]
    rows = figures(options.mixes, found)
    for row in rows:
        print(row.row())
    command = f"python bench/best_slices.py --mixes {options.mixes}"
    date = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    about = RunInfo(command, "none", date, "simulated pGPU", "sim", time.monotonic() - began, sources())
    write(options.out, "sim-best-slices", about, rows, {})


if __name__ == "__main__":
    main()
