"""Processes that run torch programs on request, side by side: their steps in a span, and how busy the card was.

Processes load all their programs first and rest until asked for one. A resting process does not use the card, so pods
and plain processes can take turns within seconds.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pods import BenchError, Pod, tail, wait_for
from script import Script
from torch_worker import CHUNKS, REST, ask

from qgpu.model import NS_PER_MS, NS_PER_S, NS_PER_US

_WORKER = Path(__file__).with_name("torch_worker.py")
#: Loading some programs in several processes at once takes half a minute.
_LOAD_S = 240.0
_POLL_S = 0.1
_SAMPLE_S = 0.05
#: With at least this many samples, NVML's own samples are more accurate than its current value.
_ENOUGH_SAMPLES = 3
#: CPUs left to the daemon and the guardian, and the fewest that a process gets of its own.
_OTHERS_CPUS, _LEAST_CPUS = 2, 2

#: When each step ended (ns since the epoch) and how long it took (ns).
Steps = Sequence[tuple[int, int]]


def speed(steps: Steps, start_ns: int, end_ns: int) -> float:
    """Return steps per second in a span of time.

    A step counts by the part of it that lies in the span, as if it progressed evenly. As in ``progress``, everything
    weighs less towards the ends of the span (a Hann window), so the phase at which the span cuts a turn or a long step
    hardly matters.
    """

    def weight(at_ns: int) -> float:
        """Return the part of the whole weight that lies before a moment."""
        part = min(1.0, max(0.0, (at_ns - start_ns) / (end_ns - start_ns)))
        return part - math.sin(2 * math.pi * part) / (2 * math.pi)

    return sum((weight(end) - weight(end - took)) * NS_PER_S / took for end, took in steps if took > 0)


def p99(values: Sequence[float]) -> float:
    """Return the least value that at most one in a hundred exceeds; NaN for no values."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1] if values else math.nan


@dataclass(frozen=True, slots=True)
class StepStats:
    """The results of one process in a span: steps per second, and the length (ms) of steps that ended in it."""

    speed: float
    median_ms: float
    p99_ms: float


def step_stats(steps: Steps, start_ns: int, end_ns: int) -> StepStats:
    """Return the results of a process from ``start_ns`` to ``end_ns``."""
    took_ms = [took / NS_PER_MS for end, took in steps if start_ns <= end < end_ns]
    middle = statistics.median(took_ms) if took_ms else math.nan
    return StepStats(speed(steps, start_ns, end_ns), middle, p99(took_ms))


@dataclass(frozen=True, slots=True)
class SpanResult:
    """One span: the results of each process, in the order asked, and the part of time the card was busy (or NaN)."""

    processes: tuple[StepStats, ...]
    busy: float


@dataclass(slots=True)
class Busy:
    """The part of time (0 to 1) in which the card ran anything, by NVML: its current values, and its own samples."""

    told: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)

    def mean(self) -> float:
        """Return the mean of the samples if there are enough, else of the current values; NaN without either."""
        values = self.samples if len(self.samples) >= _ENOUGH_SAMPLES else self.told
        return statistics.fmean(values) if values else math.nan


@contextmanager
def watched(simulated: bool) -> Iterator[Busy]:
    """Watch how busy card 0 is; complete at the end. Without NVML it stays empty."""
    busy = Busy()
    card = None if simulated else _card()
    if card is None:
        yield busy
        return
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(card, busy, over), daemon=True)
    watcher.start()
    try:
        yield busy
    finally:
        over.set()
        watcher.join()


def _card() -> Any:
    import pynvml

    try:
        pynvml.nvmlInit()  # again and again: NVML counts, and the process keeps it until it ends
        return pynvml.nvmlDeviceGetHandleByIndex(0)
    except pynvml.NVMLError:
        return None


def _watch(card: Any, busy: Busy, over: threading.Event) -> None:
    import pynvml

    began_us = time.time_ns() // NS_PER_US
    while not over.wait(_SAMPLE_S):
        with suppress(pynvml.NVMLError):
            busy.told.append(pynvml.nvmlDeviceGetUtilizationRates(card).gpu / 100)
    ended_us = time.time_ns() // NS_PER_US
    with suppress(pynvml.NVMLError):  # also raised if there are none
        _, samples = pynvml.nvmlDeviceGetSamples(card, pynvml.NVML_GPU_UTILIZATION_SAMPLES, began_us)
        inside = [each for each in samples if began_us <= each.timeStamp <= ended_us]
        busy.samples += [each.sampleValue.uiVal / 100 for each in inside]


def split_cpus(cpus: Iterable[int]) -> tuple[list[int], list[int]]:
    """Divide CPUs between two processes, and leave two to all else; both lists are empty if there are too few."""
    ours = sorted(cpus)[:-_OTHERS_CPUS]
    half = len(ours) // 2 if len(ours) >= 2 * _LEAST_CPUS else 0
    return ours[:half], ours[half : 2 * half]


class TorchProcesses:
    """Processes that rest until they are asked for a program.

    With ``cpus_apart``, processes whose names end alike share CPUs that no other process here uses.
    """

    def __init__(self, script: Script, *, cpus_apart: bool = False) -> None:
        self._script = script
        first, second = split_cpus(os.sched_getaffinity(0)) if cpus_apart else ([], [])
        self._cpus = {"a": first, "b": second}
        self._members: dict[str, Pod] = {}
        #: How much of the results of each process has been read.
        self._read: dict[str, int] = {}

    def pod(self, name: str, programs: Iterable[str], *, pod_class: str = "offline") -> None:
        """Start a process with these programs in a pod."""
        self._keep(self._script.bench.start_pod(name, self._command(name, programs), pod_class=pod_class))

    def outside(self, name: str, programs: Iterable[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a process with these programs outside of any pod."""
        self._keep(self._script.bench.start_outside(name, self._command(name, programs), environment))

    def member(self, name: str, group: str, programs: Iterable[str]) -> None:
        """Start a process with these programs as a member of a group."""
        self._keep(self._script.bench.start_member(name, self._command(name, programs), group))

    def _command(self, name: str, programs: Iterable[str]) -> list[str]:
        cpus = self._cpus.get(name[-1], [])
        chosen = ["--cpus", ",".join(map(str, cpus))] if cpus else []
        return [sys.executable, str(_WORKER), "--programs", ",".join(programs), *chosen]

    def _keep(self, pod: Pod) -> None:
        self._members[pod.name], self._read[pod.name] = pod, 0

    def wait_ready(self) -> None:
        """Wait until all have loaded their programs."""
        began = time.monotonic()
        wait_for("torch programs to load", self._ready, _LOAD_S)
        self._script.say(f"{', '.join(self._members)}: loaded in {time.monotonic() - began:.0f} s")

    def _ready(self) -> bool:
        self._check()
        return all("ready" in pod.log.read_text(errors="replace").splitlines() for pod in self._members.values())

    def take(self, asked: Mapping[str, str], settle_s: float, span_s: float) -> SpanResult:
        """Let each process run a program, wait until that has settled, measure for a span, and let all rest again.

        Raises BenchError as soon as a process has ended, and if one did no step.
        """
        for name, program in asked.items():
            ask(self._members[name].file, program)
        self._sleep(settle_s)
        with watched(self._script.bench.simulated) as busy:
            start_ns = time.time_ns()
            self._sleep(span_s)
            end_ns = time.time_ns()
        for name in asked:
            ask(self._members[name].file, REST)
        found = tuple(step_stats(self._steps(name, program), start_ns, end_ns) for name, program in asked.items())
        for name, each in zip(asked, found, strict=True):
            if not each.speed:
                raise BenchError(f"{name}: no step of {asked[name]} in {span_s:.1f} s")
        return SpanResult(found, busy.mean())

    def _steps(self, name: str, program: str) -> Steps:
        """Return the steps of a process since it was asked for a program, once it rests."""
        file = self._members[name].file.with_suffix(CHUNKS)
        lines: list[str] = []

        def told() -> bool:
            self._check()
            if file.exists():  # made of ASCII: a place in the text is one in the file
                lines[:] = file.read_text()[self._read[name] :].splitlines(keepends=True)
            return bool(lines) and lines[-1].endswith("\n")

        wait_for(f"{name} to end its last step of {program}", told)
        self._read[name] += sum(map(len, lines))
        chunks = [json.loads(line) for line in lines]
        return [(end, took) for chunk in chunks if chunk["program"] == program for end, took in chunk["steps"]]

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._check()
            time.sleep(min(left, _POLL_S))

    def _check(self) -> None:
        for name, pod in self._members.items():
            if pod.process.poll() is not None:
                raise BenchError(f"{name}: ended with code {pod.process.returncode}: {tail(pod.log, 12)}")
