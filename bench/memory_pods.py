"""Pods that leave a card and come back, for the scripts about memory: requests, places, free memory, kills."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil
import pynvml
from attacks.failures import guardians
from figures import Asked, Figure, at_most, median
from harness import ROOT, Bench
from pods import BenchError, wait_for
from script import Script

from qgpu.checkpoint.helper import Helper
from qgpu.errors import QgpuError
from qgpu.nvidia import nvml

GIB, MIB = 1 << 30, 1 << 20
#: Short kernels with long pauses, by a load that holds memory.
SMALL = ("--memory", "512MiB", "--period", "10ms")
#: A pod's limit less its load's memory: room for a context.
ROOM_GIB = 1
TIMEOUT_S = 90.0

#: The longest time from the requests to a kill: longer than all calls take.
_LATEST_S = 1.0
#: A program that takes and gives back memory up to its pod's limit.
GREEDY = (sys.executable, str(ROOT / "bench" / "memory_greedy.py"))
#: How many of the moved pods compute, and how many take all the memory that they get.
_PODS, _GREEDY = 4, 2
_SAMPLE_S = 0.2


def driver(pid: int, moves: Mapping[str, str] | None = None) -> tuple[float, float]:
    """Take a plain process off its card and put it back, by the driver's own calls; return both times in s.

    ``moves`` gives every card of the host the one that takes its place.
    """
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys([str(ROOT), *known])))  # for the helper
    took = []
    calls: Sequence[tuple[str, dict[str, Any]]]
    for calls in (
        (("lock", {"timeout_ms": 10_000}), ("checkpoint", {})),
        (("restore", {"moves": dict(moves or {})}), ("unlock", {})),
    ):
        began, helper = time.monotonic(), Helper()
        for call, arguments in calls:
            helper.call(call, TIMEOUT_S, pid=pid, **arguments)
        took.append(time.monotonic() - began)
        helper.close()
    return took[0], took[1]


def move(bench: Bench, name: str, how: str) -> float:
    """Suspend or resume a pod; return how long that took in s."""
    began = time.monotonic()
    bench.ask(f"pod.{how}", name=name)
    settled(bench, name)
    found = place(bench, name)
    if found["state"] != {"suspend": "suspended", "resume": "running"}[how]:
        raise BenchError(f"pod {name}: {how}: it is {found['state']}: {found['state_error']}")
    return time.monotonic() - began


def place(bench: Bench, name: str) -> dict[str, Any]:
    """Return what the daemon says of a pod."""
    for pod in bench.pods():
        if pod["name"] == name:
            return pod
    raise BenchError(f"pod {name} is gone")


def settled(bench: Bench, *names: str) -> None:
    """Wait until no pod is being suspended, resumed or moved."""

    def done() -> bool:
        try:
            return all(place(bench, name)["state"] in ("running", "suspended") for name in names)
        except QgpuError:  # a guardian is being replaced
            return False

    wait_for(f"pods {', '.join(names)} to arrive", done, TIMEOUT_S)


def free(bench: Bench, gpu: int = 0) -> int:
    """Return the free bytes of a pGPU."""
    card = next(card for card in bench.ask("gpu.list")["gpus"] if card["index"] == gpu)
    if bench.simulated:
        held: Iterator[int] = (use["memory"] for pod in bench.pods() for use in pod["usage"] if use["gpu"] == gpu)
        return int(card["memory"]) - sum(held)
    return nvml.free_memory(card["uuid"])


class OverLimit:
    """Watches by NVML how much card memory pods have beyond their limits, while daemons come and go."""

    def __init__(self, bench: Bench, limit: int) -> None:
        self._bench, self._limit = bench, limit
        #: The most that any pod had beyond its limit, in bytes; and how many samples there were of pods on a card.
        self.most = self.samples = 0
        self._pod_of: dict[int, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        pynvml.nvmlInit()
        cards = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        while not self._over.wait(_SAMPLE_S):
            with suppress(QgpuError, OSError):  # the daemon is being killed: the pods are as before
                self._pod_of = {pid: pod["name"] for pod in self._bench.pods() for pid in pod["pids"]}
            used: Counter[str] = Counter()
            for card in cards:
                for each in pynvml.nvmlDeviceGetComputeRunningProcesses(card):
                    if each.pid in self._pod_of:
                        used[self._pod_of[each.pid]] += each.usedGpuMemory or 0
            self.samples += sum(map(bool, used.values()))
            self.most = max(self.most, *(size - self._limit for size in used.values()), self.most)


def kills(
    script: Script,
    of_each: Mapping[str, int],
    begin: Callable[[str], None],
    enough: Asked,
) -> list[Figure]:
    """Kill daemon, guardian or helpers as often as ``of_each`` says, in a random order, while ``begin`` moves pods."""
    bench, dice = script.bench, random.Random(1)  # noqa: S311
    names = [*(f"pod-{number}" for number in range(_PODS)), *(f"greedy-{number}" for number in range(_GREEDY))]
    limit = (1 + ROOM_GIB) * GIB
    met: dict[str, int] = dict.fromkeys(of_each, 0)
    killed = lost = 0
    with bench.daemon():
        indexes = [card["index"] for card in bench.ask("gpu.list")["gpus"]]
        before = sum(free(bench, index) for index in indexes)
        pods = [bench.pod(name, "100us", *SMALL, memory=f"{limit >> 20}MiB") for name in names[:_PODS]]
        pods += [bench.start_pod(name, GREEDY, memory=f"{limit >> 20}MiB") for name in names[_PODS:]]
        script.running(*pods)
        watched = OverLimit(bench, limit)
        every = [kind for kind, rounds in of_each.items() for _ in range(rounds)]
        for what in dice.sample(every, len(every)):
            for name in names:
                try:
                    begin(name)
                except QgpuError as error:
                    script.say(f"{name}: {error}")
            time.sleep(dice.uniform(0, _LATEST_S))
            met[what] += sum(place(bench, name)["state"] not in ("running", "suspended") for name in names)
            killed += _kill(script, what)
            settled(bench, *names)
        for name in names:
            if place(bench, name)["state"] == "suspended":
                try:
                    move(bench, name, "resume")
                except (BenchError, QgpuError) as error:
                    script.say(f"resume: {error}")
        for pod in pods:
            try:
                bench.wait_busy(pod)
            except BenchError as error:
                script.say(f"lost: {error}")
                lost += 1
        watched.end()
        bench.end_pods()

        def left() -> int:
            return before - sum(free(bench, index) for index in indexes)

        with suppress(BenchError):
            wait_for("the cards to be empty", lambda: left() < MIB, 10)
        leaked = max(0, left())
    total = sum(met.values())
    script.say(f"{killed} kills, {total} pods met on the way: {met}; {lost} lost; {leaked} bytes left")
    script.say(f"{watched.most} bytes over a limit in {watched.samples} samples")
    if not watched.samples:
        raise BenchError("NVML named no process of a pod")
    return [
        median("kills", [killed], *enough, note=f"SIGKILLs, {dict(of_each)} rounds, {len(names)} pods"),
        median("moments", [total], *enough, note=f"pods on the way when something was killed: {met}"),
        median("pods_lost", [lost], *at_most(0), note="pods that do not run in the end"),
        median(
            "bytes_over_quota",
            [watched.most],
            *at_most(0),
            note=f"the most that NVML showed of any pod beyond its limit, in {watched.samples} samples; {_GREEDY} pods "
            "took all that they got",
        ),
        median("memory_leaked_bytes", [leaked], *at_most(0), note="of the cards, when all pods have ended"),
    ]


def _kill(script: Script, what: str) -> int:
    """Kill the daemon, the guardian, or every helper; return how many processes that were."""
    bench = script.bench
    if what == "daemon":
        bench.kill_daemon()
        bench.start_daemon()
        return 1
    found = guardians(bench) if what == "guardian" else _helpers(bench)
    for process in found:
        with suppress(psutil.Error):
            os.kill(process.pid, signal.SIGKILL)
    return len(found)


def _helpers(bench: Bench) -> list[psutil.Process]:
    found = []
    for process in bench.processes():
        with suppress(psutil.Error):
            if "qgpu.checkpoint" in process.cmdline():
                found.append(process)
    return found
