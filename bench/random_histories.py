"""Measures whether what happened before still decides shares: random histories under Burst Share, simulated.

    python bench/random_histories.py --histories 150      # some minutes on two cores

Pods go through three changes of quotas and programs, each of which lasts for some seconds, and end with the mix of
``random_mixes.py``. Fifteen seconds later their work is compared with that of the same mix from a fresh start.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import Figure, RunInfo, median, write
from provenance import sources
from random_mixes import Pod, draw, workload

from qgpu.model import Grant
from tests.simulation import Simulation

_CHANGES, _SETTLE_S, _SPAN_S = 3, 15, 4
_ROOT = Path(__file__).resolve().parent.parent


class History(NamedTuple):
    """How far pods are from their work after a fresh start, as parts of the card."""

    #: The pod that differs most, and the pod that lost most.
    differs: float
    less: float


def measure(seed: int) -> History:
    """Compare a mix with a history and the same mix without one; every other one has short steps."""
    pods, late_ms = draw(seed, short=seed % 2 == 1)
    fresh, after = (_work(pods, late_ms, seed, changes) for changes in (0, _CHANGES))
    return History(
        max(abs(fresh[name] - after[name]) for name in fresh), max(fresh[name] - after[name] for name in fresh)
    )


def _work(pods: Sequence[Pod], late_ms: float, seed: int, changes: int) -> dict[str, float]:
    """Return each pod's work, as a part of the card's time, after so many changes."""
    chance = random.Random(f"history {seed}")  # noqa: S311 (a history, not a secret)
    simulation = Simulation("burst-share", late_ms=late_ms, seed=seed)
    loads: dict[str, int] = {}
    for number in range(changes + 1):
        mix = pods if number == changes else _other(pods, chance)
        _set_quotas(simulation, mix, first=not loads)
        for pod in mix:
            # Some programs go on while quotas change.
            if pod.name in loads and number < changes and chance.random() < 0.5:
                continue
            if pod.name in loads:
                simulation.host.stop_load(loads[pod.name])
            loads[pod.name] = simulation.host.start_load(pod.name, 0, pod.work)
        if number < changes:
            simulation.pass_by(chance.choice([2, 5, 12]))
    simulation.pass_by(_SETTLE_S)
    seconds = list(simulation.seconds(_SPAN_S))
    return {pod.name: statistics.fmean(second.work[pod.name] for second in seconds) for pod in pods}


def _other(pods: Sequence[Pod], chance: random.Random) -> list[Pod]:
    """Draw other quotas and programs for the same pods."""
    cuts = sorted(chance.sample(range(5, 100, 5), len(pods)))
    quotas = [end - begin for begin, end in zip([0, *cuts], cuts, strict=False)]
    return [Pod(pod.name, quota, workload(chance, quota)) for pod, quota in zip(pods, quotas, strict=True)]


def _set_quotas(simulation: Simulation, pods: Sequence[Pod], *, first: bool) -> None:
    """Admit pods, or change their quotas: first they lose the old ones, so that the sum always fits."""
    if first:
        for pod in pods:
            simulation.host.admit(pod.name, {0: Grant(cores=pod.cores)})
        return
    for pod in pods:
        simulation.host.amend(pod.name, {0: Grant()})
    for pod in pods:
        simulation.host.amend(pod.name, {0: Grant(cores=pod.cores)})


def figures(histories: Sequence[History]) -> list[Figure]:
    """Return the figures of all histories."""
    number, found = len(histories), []
    for points in (2, 5, 10):
        differ = sum(each.differs > points / 100 for each in histories)
        note = f"of {number} histories: some pod's work differs by more than {points} points of the card"
        found.append(median(f"histories_{points}_points", [differ], note=note))
    worst = max(each.less for each in histories)
    return [*found, median("history_lost_most", [worst], note="the most that a pod lost, as a part of the card")]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=150)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path, default=_ROOT / "docs" / "results")
    options = parser.parse_args()
    began, seeds = time.monotonic(), range(options.first, options.first + options.histories)
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        histories = list(workers.map(measure, seeds, chunksize=2))
    for seed, each in zip(seeds, histories, strict=True):
        if each.differs > 0.02:
            print(f"history {seed}: a pod differs by {each.differs:.3f} of the card; the most lost is {each.less:.3f}")
    found = figures(histories)
    for figure in found:
        print(figure.row())
    command = f"python bench/random_histories.py --histories {options.histories}"
    date = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    about = RunInfo(command, "none", date, "simulated pGPU", "sim", time.monotonic() - began, sources())
    write(options.out, "sim-random-histories", about, found, {})


if __name__ == "__main__":
    main()
