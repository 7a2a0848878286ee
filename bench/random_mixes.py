"""Random mixes of pods under Burst Share on the simulator: which pods miss their floor, and how much idles.

    python bench/random_mixes.py --mixes 10000        # some twenty minutes on two cores
    python bench/random_mixes.py --mixes 200 --out /tmp/r
    python bench/random_mixes.py --mixes 500 --short-steps     # into sim-short-steps

A mix is two to four pods: floods, batches of 0.5 to 30 ms with a wait after each, timers, frameworks that launch kernel
by kernel. With ``--short-steps`` the first pod of each mix waits for its own work every 0.03 to 0.6 ms. Quotas come in
steps of 5 %; some pods have none. A pod's floor is the lesser of its quota and what it does alone, in work per second
without context switches. The same mix with the driver's own timeslices is plain sharing.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import Figure, RunInfo, at_most, median, write
from provenance import sources

from qgpu.load.workload import Workload
from qgpu.model import NS_PER_S, Grant, Policy
from tests.simulation import FLOOD, Simulation, batches, eager, every

_SETTLE_S, _SPAN_S = 4, 4
_ROOT = Path(__file__).resolve().parent.parent


class Pod(NamedTuple):
    """A pod of a mix: its quota in per cent of the card, and its load."""

    name: str
    cores: int | None
    work: Workload


class Mix(NamedTuple):
    """The results of one mix, under Burst Share and under plain sharing."""

    #: How far the worst pod is below its floor, as a part of the card.
    missed: float
    missed_plain: float
    #: The part of its floor that the worst pod has.
    kept: float
    kept_plain: float
    #: The part of the time in which the card idles although pods could use it, under both. Pods that rest at the same
    #: moment count, too.
    idle: float
    idle_plain: float
    #: The work of all pods, under Burst Share and under plain sharing, as parts of the card's time.
    work: float
    work_plain: float
    #: The sum of the speeds of all pods, each as a part of its speed alone, under both.
    speeds: float
    speeds_plain: float
    #: Each pod's floor, as a part of the card's time.
    floors: Mapping[str, float]


def workload(chance: random.Random, cores: int | None) -> Workload:
    """Draw a pod's load; a timer asks for at most four fifths of a quota, because it would skip periods otherwise."""
    kind = chance.choice(["flood", "batches", "batches", "batches", "timer", "eager", "eager"])
    if kind == "flood":
        return FLOOD
    if kind == "batches":
        return batches(chance.uniform(500, 30_000), chance.uniform(10, 300))
    if kind == "timer":
        period_us = chance.choice([2000, 5000, 10_000, 20_000, 100_000])
        return every(period_us, period_us * chance.uniform(0.02, min(0.8, 0.8 * (cores or 10) / 100)))
    return eager(chance.uniform(1500, 15_000), chance.uniform(0.1, 0.95), chance.choice([5, 10, 20]))


def short_steps(chance: random.Random) -> Workload:
    """Draw a load that waits for its own work after each step of 0.03 to 0.6 ms."""
    return batches(math.exp(chance.uniform(math.log(30), math.log(600))), chance.uniform(10, 250))


def draw(seed: int, *, short: bool = False) -> tuple[list[Pod], float]:
    """Draw a mix: its pods, and by how many milliseconds the host is late. With ``short`` the first has short steps."""
    chance = random.Random(seed)  # noqa: S311 (a mix, not a secret)
    cuts = sorted(chance.sample(range(5, 100, 5), chance.choice([2, 2, 2, 3, 3, 4])))
    quotas: list[int | None] = [end - begin for begin, end in zip([0, *cuts], cuts, strict=False)]
    if chance.random() < 0.2:
        quotas[-1] = None
    pods = [Pod(f"pod{n}", quota, workload(chance, quota)) for n, quota in enumerate(quotas)]
    if short:
        pods[0] = pods[0]._replace(work=short_steps(chance))
    return pods, chance.choice([0, 2])


def measure(seed: int, *, short: bool = False) -> Mix:
    """Run one mix under Burst Share and under plain sharing."""
    pods, late_ms = draw(seed, short=short)
    alone = {pod.name: run("plain", [pod._replace(cores=None)], seed)[0][pod.name] for pod in pods}
    ours, idle = run("burst-share", pods, seed, late_ms)
    plain, idle_plain = run("plain", pods, seed)
    floors = {pod.name: min((pod.cores or 0) / 100, alone[pod.name]) for pod in pods}
    unwanted = max(0.0, 1 - sum(alone.values()))
    return Mix(
        missed(floors, ours),
        missed(floors, plain),
        kept(floors, ours),
        kept(floors, plain),
        max(0.0, idle - unwanted),
        max(0.0, idle_plain - unwanted),
        sum(ours.values()),
        sum(plain.values()),
        sum(ours[name] / alone[name] for name in ours),
        sum(plain[name] / alone[name] for name in plain),
        floors,
    )


def run(
    policy: str | Policy, pods: Sequence[Pod], seed: int, late_ms: float = 0, settle_s: int = _SETTLE_S
) -> tuple[dict[str, float], float]:
    """Return the work of each pod and the idle time, as parts of the card's time."""
    simulation = Simulation(policy, late_ms=late_ms, seed=seed)
    for pod in pods:
        simulation.add(pod.name, Grant(cores=pod.cores), pod.work)
    simulation.pass_by(settle_s)
    before_ns = simulation.host.times(0).idle_ns
    seconds = list(simulation.seconds(_SPAN_S))
    work = {pod.name: statistics.fmean(second.work[pod.name] for second in seconds) for pod in pods}
    return work, (simulation.host.times(0).idle_ns - before_ns) / (_SPAN_S * NS_PER_S)


def missed(floors: Mapping[str, float], work: Mapping[str, float]) -> float:
    """Return how far the worst pod is below its floor, as a part of the card; negative if all are above."""
    return max(least - work[name] for name, least in floors.items())


def kept(floors: Mapping[str, float], work: Mapping[str, float]) -> float:
    """Return the part of its floor that the worst pod has; more than 1 if all are above. Floors of 0 do not count."""
    return min(work[name] / least for name, least in floors.items() if least)


def figures(mixes: Sequence[Mix]) -> list[Figure]:
    """Return the figures of all mixes."""
    number = len(mixes)
    found = []
    for tag, all_missed in (("", [mix.missed for mix in mixes]), ("_plain", [mix.missed_plain for mix in mixes])):
        limit = at_most(0) if not tag else ("", None)
        for points in (1, 3, 10):
            value = sum(each > points / 100 for each in all_missed)
            asked = limit if points == 1 else ("", None)
            note = f"of {number} mixes: some pod is more than {points} points of the card below its floor"
            suffix = "" if points == 1 else f"_{points}_points"
            found.append(median(f"floor_misses{suffix}{tag}", [value], *asked, note=note))
    for tag, parts in (("", [mix.kept for mix in mixes]), ("_plain", [mix.kept_plain for mix in mixes])):
        for name, at in (("p10", number // 10), ("median", number // 2)):
            note = "the part of its floor that the worst pod of a mix has"
            found.append(median(f"floor_kept_{name}{tag}", [sorted(parts)[at]], note=note))
    for tag, idle in (("", [mix.idle for mix in mixes]), ("_plain", [mix.idle_plain for mix in mixes])):
        most = sorted(idle)[int(0.99 * number)]
        asked = at_most(0.03) if not tag else ("", None)
        found.append(median(f"idle_while_wanted{tag}", [most], *asked, note="99th percentile of mixes"))
        found.append(median(f"idle_while_wanted_mean{tag}", [statistics.fmean(idle)], note="mean of mixes"))
    totals = sorted(mix.work / mix.work_plain for mix in mixes)
    speeds = sorted(mix.speeds / mix.speeds_plain for mix in mixes)
    for tag, ratios, what in (("total", totals, "work of all pods"), ("speeds", speeds, "sum of all pods' speeds")):
        for name, at in (("least", 0), ("p1", int(0.01 * number)), ("median", number // 2)):
            found.append(median(f"{tag}_over_plain_{name}", [ratios[at]], note=f"{what} over that by plain sharing"))
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=_ROOT / "docs" / "results")
    parser.add_argument("--short-steps", action="store_true", help="the first pod of each mix has short steps")
    options = parser.parse_args()
    began = time.monotonic()
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        mixes = list(workers.map(partial(measure, short=options.short_steps), range(options.mixes), chunksize=8))
    found = figures(mixes)
    for figure in found:
        print(figure.row())
    name, option = ("sim-short-steps", " --short-steps") if options.short_steps else ("sim-random-mixes", "")
    command = f"python bench/random_mixes.py --mixes {options.mixes}{option}"
    date = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    about = RunInfo(command, "none", date, "simulated pGPU", "sim", time.monotonic() - began, sources())
    write(options.out, name, about, found, {})


if __name__ == "__main__":
    main()
