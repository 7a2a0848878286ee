"""A day of training jobs under online services, in 100 s on a card: work done and p99, by four ways to share the card.

    python bench/day_on_card.py                # as root, on a GPU with torch; eight minutes

The day is drawn small: an online pod takes all but 24 GiB of the card, jobs and services are torch programs of some
GiB, and a turn of memory lasts 20 s. The ways are those of ``overcommit_day.py``, which simulates whole days:

- overcommit: qgpu grants memory twice; jobs yield to services and take turns;
- plain: no qgpu; a program that does not fit waits until another ends, services first;
- partition: MPS; all day, services have their memory and the same part of the SMs, and jobs have the rest;
- whole: the card is for services together, or for one job until it ends.

Moves take as long as in a long day, so they are a larger part of this day. A program takes some seconds to start in
every way.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field

from figures import Figure, median
from harness import QGPUD, ROOT
from overcommit_day import ExclusiveCard, FirstComeFirstServed, Job, Placement, Service
from pods import BenchError, Pod, tail, wait_for
from rivals import mps, mps_present
from script import NotHereError, Script, listed, run
from torch_processes import p99

from qgpu.model import NS_PER_MS, NS_PER_S
from qgpu.policies.memory_turns import GIB

DAY_S, TURN_S, _POLL_S = 100.0, 20, 0.1
ROOM = 24 * GIB
TRAINING, BY_DAY, BY_NIGHT = "training-medium", "service-graph", "service-eager"
#: A job's work is the time that it takes alone.
JOBS = tuple(Job(f"job{n}", at_s, 9 * GIB, 1.0, 25.0) for n, at_s in enumerate((0.0, 2.0, 20.0, 50.0)))
SERVICES = (Service("night", 8.0, 28.0, 7 * GIB, 0.2), Service("day", 40.0, 85.0, 7 * GIB, 0.3))
PROGRAM = {"night": BY_NIGHT, "day": BY_DAY, **{job.name: TRAINING for job in JOBS}}
_ALONE_S, _TIMEOUT_S = 6.0, 90.0
_SHORT_TURNS = "from qgpu.policies import memory_turns; memory_turns.TURN_NS = {ns}; "


@dataclass(slots=True)
class Day:
    """The results of one way: what each program did, and when the day began (ns since the epoch)."""

    began_ns: int
    #: When each step ended and how long it took, in ns.
    steps: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def work_s(self, step_s: float) -> float:
        """Return the work of all jobs, as the time that it takes alone."""
        return sum(len(self.steps.get(job.name, ())) for job in JOBS) * step_s

    def ended(self, steps: int) -> int:
        """Count the jobs that did all their steps."""
        return sum(len(self.steps.get(job.name, ())) >= steps for job in JOBS)

    def requests_ms(self, name: str) -> list[float]:
        """Return how long each request of a service took."""
        return [took / NS_PER_MS for _, took in self.steps.get(name, ())]

    def began_s(self, service: Service) -> float:
        """Return the time from a service's start to its first answer; its whole time if it answered none."""
        firsts = [end / NS_PER_S for end, _ in self.steps.get(service.name, ())[:1]]
        began = self.began_ns / NS_PER_S + service.at_s
        return min([first - began for first in firsts], default=service.end_s - service.at_s)


#: Starts a program by its name, class and limit (bytes).
Start = Callable[[str, list[str], str, int], Pod]


def run_day(script: Script, start: Start, place: Placement, steps: int) -> Day:
    """Run a day: start what ``place`` lets onto the card, end services when their time is over."""
    began = time.monotonic()
    day, pods = Day(time.time_ns()), dict[str, Pod]()
    limits = {job.name: job.limit for job in JOBS} | {service.name: service.limit for service in SERVICES}
    while (now_s := time.monotonic() - began) < DAY_S:
        over = {name for name, pod in pods.items() if pod.process.poll() is not None}
        for service in SERVICES:
            if now_s >= service.end_s and service.name in pods and service.name not in over:
                pods[service.name].end()
        for job in JOBS:
            if job.name in over and pods[job.name].process.returncode:
                raise BenchError(f"{job.name}: {tail(pods[job.name].log)}")
        jobs = [job for job in JOBS if job.at_s <= now_s and job.name not in over]
        services = [each for each in SERVICES if each.at_s <= now_s < each.end_s]
        for name in sorted(place(jobs, services) - pods.keys()):
            count = ["--steps", str(steps)] if PROGRAM[name] == TRAINING else []
            command = [sys.executable, str(ROOT / "bench" / "day_program.py"), PROGRAM[name], *count]
            pod_class = "offline" if PROGRAM[name] == TRAINING else "online"
            pods[name] = start(name, command, pod_class, limits[name])
        time.sleep(_POLL_S)
    ended_ns = time.time_ns()
    script.bench.end_pods()
    for name, pod in pods.items():
        day.steps[name] = [(end, took) for end, took in _steps(pod) if end <= ended_ns]
    return day


def _steps(pod: Pod) -> list[tuple[int, int]]:
    """Return the steps that a program has written down, without a line that is not whole."""
    lines = pod.file.read_text().splitlines(keepends=True) if pod.file.exists() else []
    numbers = (line.split() for line in lines if line.endswith("\n"))
    return [(int(end), int(took)) for end, took in numbers]


@contextmanager
def _overcommit(script: Script) -> Iterator[Start]:
    """Run qgpu with memory overcommit and short turns, beside an online pod that leaves ``ROOM`` of the card."""
    bench = script.bench
    bench.qgpud = [sys.executable, "-c", _SHORT_TURNS.format(ns=TURN_S * NS_PER_S) + QGPUD[-1]]
    try:
        with bench.daemon():
            bench.ctl("gpu", "policy", "set", "0", "--memory-overcommit", "2.0")
            filled = int(bench.ask("gpu.list")["gpus"][0]["memory"]) - ROOM
            size = f"{(filled - GIB) >> 20}MiB"
            filler = bench.pod(
                "filler", "100us", "--memory", size, "--period", "1s", memory=f"{filled >> 20}MiB", pod_class="online"
            )
            script.running(filler)

            def start(name: str, command: list[str], pod_class: str, limit: int) -> Pod:
                return bench.start_pod(name, command, memory=f"{limit >> 20}MiB", pod_class=pod_class)

            yield start
    finally:
        bench.qgpud = QGPUD


@contextmanager
def _plain(script: Script) -> Iterator[Start]:
    try:
        yield lambda name, command, _class, _limit: script.bench.start_outside(name, command)
    finally:
        script.bench.end_pods()


@contextmanager
def _partition(script: Script) -> Iterator[Start]:
    """Run MPS. Services get the same part of the SMs as of the memory, and jobs get the rest."""
    part = round(100 * _peak() / ROOM)
    with mps(script.bench) as service:

        def start(name: str, command: list[str], pod_class: str, _limit: int) -> Pod:
            percent = part if pod_class == "online" else 100 - part
            return script.bench.start_outside(name, command, service.client(percent))

        yield start


def _peak() -> int:
    return max(sum(each.limit for each in SERVICES if each.at_s <= at.at_s < each.end_s) for at in SERVICES)


def _alone(script: Script, program: str) -> list[float]:
    """Run a program alone for some seconds; return how long its steps took, in ms."""
    command = [sys.executable, str(ROOT / "bench" / "day_program.py"), program]
    pod = script.bench.start_outside(f"alone-{program}", command)

    def some() -> bool:
        if pod.process.poll() is not None:
            raise BenchError(f"{program}: {tail(pod.log)}")
        return bool(_steps(pod))

    wait_for(f"{program} to begin", some, _TIMEOUT_S)
    time.sleep(_ALONE_S)
    took = [took / NS_PER_MS for _, took in _steps(pod)]
    pod.end()
    return took


def day(script: Script) -> list[Figure]:
    """Run the same day in every way."""
    if script.bench.simulated or importlib.util.find_spec("torch") is None:
        raise NotHereError("torch on a GPU is needed; overcommit_day.py simulates days")
    alone = {program: _alone(script, program) for program in (TRAINING, BY_DAY, BY_NIGHT)}
    step_s = statistics.fmean(alone[TRAINING]) / 1e3
    steps = round(JOBS[0].work_s / step_s)
    script.say(
        f"alone: a step of training {step_s * 1e3:.1f} ms; p99 of requests {listed(map(p99, alone.values()))} ms"
    )
    ways: dict[str, tuple[Callable[[Script], AbstractContextManager[Start]], Placement]] = {
        "overcommit": (_overcommit, lambda jobs, services: {job.name for job in jobs} | {one.name for one in services}),
        "plain": (_plain, FirstComeFirstServed(ROOM, inside=True)),
        "partition": (_partition, FirstComeFirstServed(ROOM - _peak(), inside=False)),
        "whole": (_plain, ExclusiveCard()),
    }
    if not mps_present():
        del ways["partition"]
    days: dict[str, Day] = {}
    for name, (opened, place) in ways.items():
        try:
            with opened(script) as start:
                days[name] = run_day(script, start, place, steps)
        except BenchError as error:
            if name == "overcommit":
                raise
            script.say(f"{name} is left out: {error}")
            continue
        lived_day = days[name]
        first = {service.name: round(lived_day.began_s(service), 1) for service in SERVICES}
        script.say(
            f"{name}: {lived_day.work_s(step_s):.1f} s of work, {lived_day.ended(steps)} jobs ended; "
            f"steps {[len(lived_day.steps.get(job.name, ())) for job in JOBS]} of {steps}; first answer after {first} s"
        )
    return _figures(days, alone, step_s, steps)


def _figures(days: Mapping[str, Day], alone: Mapping[str, list[float]], step_s: float, steps: int) -> list[Figure]:
    ours = days["overcommit"].work_s(step_s)
    found = []
    for way, lived_day in days.items():
        work_s = lived_day.work_s(step_s)
        note = f"{DAY_S:.0f} s on a card, {way}"
        found.append(Figure(f"day_work_{way}", work_s / DAY_S, note=f"{note}: jobs' work over the day, in time alone"))
        if way != "overcommit" and work_s:
            found.append(Figure(f"day_work_over_{way}", ours / work_s, note=f"{note}: overcommit's work over it"))
        found.append(Figure(f"day_jobs_done_{way}", lived_day.ended(steps), note=f"{note}: of {len(JOBS)} jobs"))
        waits = [lived_day.began_s(service) for service in SERVICES]
        found.append(
            median(
                f"day_online_first_s_{way}", waits, note=f"{note}: from a service's start to its first answer", pick=max
            )
        )
        over = {
            service.name: p99(lived_day.requests_ms(service.name)) / p99(alone[PROGRAM[service.name]])
            for service in SERVICES
            if lived_day.requests_ms(service.name)
        }
        for name, value in over.items():
            found.append(
                Figure(f"day_p99_over_alone_{name}_{way}", value, note=f"{note}: p99 of {PROGRAM[name]}'s requests")
            )
    return found


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(run("day", {"day": day}, __doc__ or ""))
