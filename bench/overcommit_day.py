"""A simulated day of training jobs under online services, with memory turns and without: work done, and waiting times.

    python bench/overcommit_day.py                    # a minute or two; simulated, no card is used

One card of 141 GiB. Services are up by day, some also by night; training jobs arrive all day. Four ways to share it:

- overcommit: limits are granted twice; offline jobs yield to services and take turns (qgpu/policies/memory_turns.py);
- plain: limits are granted once; a pod that does not fit waits until another ends, services first;
- partition: all day, services have the most memory that they need and the same part of the compute; jobs share the
  rest;
- whole: the card is for services together, or for one job, until it ends.

In all of them the card's time is shared as by qgpu: services first, jobs equally. Moves take as long as on an H200
(docs/results/h200-memory.json); a moving pod does no work. Losses by sharing are not simulated.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import Figure, RunInfo, at_most, median, write
from provenance import sources

from qgpu.model import NS_PER_S, PodClass
from qgpu.policies.memory_turns import GIB, Place
from tests.memory_simulation import MemorySimulation

_ROOT = Path(__file__).resolve().parent.parent
_CARD, _FACTOR = 141 * GIB, 2.0
_DAY_S, _STEP_S, _HOUR_S = 24 * 3600, 10, 3600


@dataclass(frozen=True, slots=True)
class Job:
    """A training job: it asks for a part of the card, and ends after ``work_s`` of card time."""

    name: str
    at_s: float
    limit: int
    part: float
    work_s: float


@dataclass(frozen=True, slots=True)
class Service:
    """An online service, up from ``at_s`` to ``end_s``; ``part`` of the card is busy with it."""

    name: str
    at_s: float
    end_s: float
    limit: int
    part: float


@dataclass(slots=True)
class Day:
    """What became of a day under one way of sharing."""

    work_s: float = 0.0
    done: int = 0
    #: How long each service waited for its memory, and each job until it began.
    service_waits_s: dict[str, float] = field(default_factory=dict)
    job_waits_s: dict[str, float] = field(default_factory=dict)
    moves: int = 0


def draw_day(seed: int) -> tuple[list[Job], list[Service]]:
    """Draw a day."""
    chance = random.Random(seed)  # noqa: S311 (a day, not a secret)
    services = []
    for number in range(3):
        begins, ends = chance.uniform(7, 10), chance.uniform(18, 22)
        limit, part = chance.choice([15, 20, 25]) * GIB, chance.uniform(0.05, 0.25)
        services.append(Service(f"day{number}", begins * _HOUR_S, ends * _HOUR_S, limit, part))
    for number in range(3):
        begins = chance.choice([chance.uniform(0, 6), chance.uniform(22, 23.5)])
        limit = chance.choice([15, 20, 25]) * GIB
        services.append(Service(f"night{number}", begins * _HOUR_S, (begins + 0.4) * _HOUR_S, limit, 0.2))
    jobs, at_s = [], 0.0
    while at_s < _DAY_S:
        limit = chance.choice([20, 30, 40, 60]) * GIB
        jobs.append(Job(f"job{len(jobs)}", at_s, limit, chance.uniform(0.3, 0.8), chance.uniform(0.5, 4) * _HOUR_S))
        at_s += chance.expovariate(1 / (1.5 * _HOUR_S))
    return jobs, services


def divide(left: float, parts: Mapping[str, float]) -> dict[str, float]:
    """Divide a part of the card equally among jobs that ask for at most ``parts``."""
    given: dict[str, float] = {}
    for number, (name, asked) in enumerate(sorted(parts.items(), key=lambda each: each[1])):
        given[name] = min(asked, left / (len(parts) - number))
        left -= given[name]
    return given


#: Lets a moment pass for the present jobs and services, by name; returns those that compute in it.
Placement = Callable[[Sequence[Job], Sequence[Service]], set[str]]


def run_day(jobs: Sequence[Job], services: Sequence[Service], place: Placement, compute: float | None = None) -> Day:
    """Run a day. ``compute``: the part of the card that jobs may use; None: what services leave."""
    day, left = Day(), {job.name: job.work_s for job in jobs}
    for now_s in range(0, _DAY_S, _STEP_S):
        asked = [job for job in jobs if job.at_s <= now_s and left[job.name] > 0]
        up = [each for each in services if each.at_s <= now_s < each.end_s]
        runs = place(asked, up)
        for each in up:
            day.service_waits_s[each.name] = day.service_waits_s.get(each.name, 0) + _STEP_S * (each.name not in runs)
        free = 1 - sum(each.part for each in up if each.name in runs) if compute is None else compute
        given = divide(max(0.0, free), {job.name: job.part for job in asked if job.name in runs})
        for job in asked:
            if left[job.name] == job.work_s and job.name not in runs:
                day.job_waits_s[job.name] = day.job_waits_s.get(job.name, 0) + _STEP_S
            worked_s = min(left[job.name], given.get(job.name, 0) * _STEP_S)
            left[job.name] -= worked_s
            day.work_s += worked_s
            day.done += worked_s > 0 and left[job.name] <= 0
    return day


class OvercommittedMemory:
    """Memory turns: memory is granted ``_FACTOR`` times, and offline pods yield to services."""

    def __init__(self) -> None:
        self.simulation = MemorySimulation(_CARD, step_ns=_STEP_S * NS_PER_S)

    def __call__(self, jobs: Sequence[Job], services: Sequence[Service]) -> set[str]:
        """Return who is on the card."""
        there = self.simulation.pods
        for name in there.keys() - {each.name for each in (*jobs, *services)}:
            self.simulation.remove(name)
        for service in services:
            if service.name not in there:
                self.simulation.add(service.name, service.limit, pod_class=PodClass.ONLINE)
        for job in jobs:
            if job.name in there:
                continue
            if sum(pod.seen.limit or 0 for pod in there.values()) + job.limit > _FACTOR * _CARD:
                break
            self.simulation.add(job.name, job.limit, cores=10)
        self.simulation.step()
        return {name for name, pod in there.items() if pod.begun and pod.seen.place is Place.ON}

    @property
    def moves(self) -> int:
        """Return how often pods that have not ended have left the card so far."""
        return sum(what == Place.LEAVING.value for pod in self.simulation.pods.values() for _, what in pod.moves)


class FirstComeFirstServed:
    """First come, first served within ``room``; services first if they are ``inside``. No pod yields."""

    def __init__(self, room: int, *, inside: bool) -> None:
        self._room, self._inside = room, inside
        self._runs: dict[str, int] = {}

    def __call__(self, jobs: Sequence[Job], services: Sequence[Service]) -> set[str]:
        """Return who is on the card."""
        here = {each.name for each in (*jobs, *services)}
        self._runs = {name: limit for name, limit in self._runs.items() if name in here}
        for each in (*(services if self._inside else ()), *jobs):
            if each.name in self._runs:
                continue
            if sum(self._runs.values()) + each.limit > self._room:
                break
            self._runs[each.name] = each.limit
        return {*self._runs, *(() if self._inside else [each.name for each in services])}


class ExclusiveCard:
    """The card for all services, or for one job until it ends."""

    def __init__(self) -> None:
        self._job = ""

    def __call__(self, jobs: Sequence[Job], services: Sequence[Service]) -> set[str]:
        """Return who is on the card."""
        names = [job.name for job in jobs]
        if self._job not in names:
            self._job = "" if services or not names else names[0]
        return {self._job} if self._job else {each.name for each in services}


def measure(seed: int) -> dict[str, Day]:
    """Run one day in every way."""
    jobs, services = draw_day(seed)
    peak = max(sum(each.limit for each in services if each.at_s <= at.at_s < each.end_s) for at in services)
    overcommitted = OvercommittedMemory()
    days = {
        "overcommit": run_day(jobs, services, overcommitted),
        "plain": run_day(jobs, services, FirstComeFirstServed(_CARD, inside=True)),
        "partition": run_day(
            jobs, services, FirstComeFirstServed(_CARD - peak, inside=False), compute=1 - peak / _CARD
        ),
        "whole": run_day(jobs, services, ExclusiveCard()),
    }
    days["overcommit"].moves = overcommitted.moves
    return days


def figures(days: Sequence[Mapping[str, Day]]) -> list[Figure]:
    """Return the figures of all days."""
    found = [Figure("days", len(days), note="simulated days")]
    for way in ("partition", "plain", "whole"):
        ratios = [day["overcommit"].work_s / day[way].work_s for day in days]
        found.append(median(f"work_over_{way}", ratios, note=f"simulated: jobs' work in a day over that by {way}"))
    for way in days[0]:
        work = [day[way].work_s / _HOUR_S for day in days]
        found.append(median(f"work_h_{way}", work, note="simulated: hours of card time that jobs got in a day"))
        lost = [sum(day[way].service_waits_s.values()) / _HOUR_S for day in days]
        found.append(
            median(f"online_lost_h_{way}", lost, note="simulated: hours that services waited for memory in a day")
        )
        done = [float(day[way].done) for day in days]
        found.append(median(f"jobs_done_{way}", done, note="simulated: jobs that ended in the day"))
        waits = [max(day[way].service_waits_s.values(), default=0.0) for day in days]
        asked = at_most(180, " s") if way == "overcommit" else ("", None)
        note = "simulated: the longest that a service waited for memory in a day; the figure is the worst day's"
        found.append(median(f"online_wait_s_{way}", waits, *asked, note=note, pick=max))
        waits = [statistics.fmean(list(day[way].job_waits_s.values()) or [0.0]) / 60 for day in days]
        found.append(median(f"job_wait_min_{way}", waits, note="simulated: mean wait of the jobs that waited to begin"))
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=20)
    parser.add_argument("--out", type=Path, default=_ROOT / "docs" / "results")
    options = parser.parse_args()
    began = time.monotonic()
    found = figures([measure(seed) for seed in range(options.days)])
    for figure in found:
        print(figure.row())
    command = f"python bench/overcommit_day.py --days {options.days}"
    date = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    about = RunInfo(command, "none", date, "simulated day", "sim", time.monotonic() - began, sources())
    write(options.out, "overcommit-simulated", about, found, {})


if __name__ == "__main__":
    main()
