"""Where the time of a suspension goes, and what makes it faster: huge pages, several pods at once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median as median_of

from figures import Figure, median
from harness import Bench
from memory_pods import ROOM_GIB, move, place, settled
from pods import BenchError, Pod
from script import NotHereError, Script, listed

SIZE_GIB, TIMES, TOGETHER = 4, 3, 4
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True)
class _Cost:
    """One way of a pod's process: wall time, its own CPU time in user and kernel mode (s), and page faults."""

    wall_s: float
    user_s: float
    system_s: float
    faults: int


def speed(script: Script) -> list[Figure]:
    """Suspend and resume one pod, the same with huge pages, and several pods at once."""
    bench = script.bench
    if bench.simulated:
        raise NotHereError("a simulated pod has no pages")
    with bench.daemon():
        pods = [_pod(bench, "one")]
        script.running(*pods)
        off, back = _there_and_back(bench, pods[0])
        with _huge_pages():
            huge_off, huge_back = _there_and_back(bench, pods[0])
        pods += [_pod(bench, f"more-{number}") for number in range(1, TOGETHER)]
        script.running(*pods)
        together = [_at_once(bench, how, pods) for how in ("suspend", "resume")]
        script.running(*pods)
    script.say(f"off {listed(each.wall_s for each in off)} s, back {listed(each.wall_s for each in back)} s")
    script.say(
        f"with huge pages {listed(each.wall_s for each in huge_off + huge_back)} s; at once {listed(together)} s"
    )
    what = f"a pod with {SIZE_GIB} GiB"
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    return [
        median("suspend_faults_per_gib", [each.faults / SIZE_GIB for each in off], note=f"page faults, {what}"),
        _part("suspend_kernel_part", [each.system_s / each.wall_s for each in off], "in the kernel", what),
        _part("suspend_user_part", [each.user_s / each.wall_s for each in off], "in user mode", what),
        _part("resume_kernel_part", [each.system_s / each.wall_s for each in back], "in the kernel", what),
        _part("resume_user_part", [each.user_s / each.wall_s for each in back], "in user mode", what),
        _over("huge_pages_suspend_over_usual", huge_off, off, f"{what}: transparent huge pages over those as set"),
        _over("huge_pages_resume_over_usual", huge_back, back, f"{what}: transparent huge pages over those as set"),
        median(
            "together_suspend_over_one",
            [together[0] / median_of(each.wall_s for each in off)],
            note=f"{TOGETHER} pods with {SIZE_GIB} GiB each suspended at once, over one of them alone",
        ),
        median(
            "together_resume_over_one",
            [together[1] / median_of(each.wall_s for each in back)],
            note=f"{TOGETHER} pods resumed at once, over one of them alone",
        ),
        median("numa_nodes", [nodes], note="of this host; with one there is nothing to place"),
    ]


def _pod(bench: Bench, name: str) -> Pod:
    return bench.pod(
        name, "100us", "--memory", f"{SIZE_GIB}GiB", "--period", "10ms", memory=f"{SIZE_GIB + ROOM_GIB}GiB"
    )


def _part(name: str, parts: Sequence[float], where: str, what: str) -> Figure:
    return median(name, parts, note=f"CPU time of the process {where}, over the time from request to end, {what}")


def _over(name: str, ours: Sequence[_Cost], usual: Sequence[_Cost], note: str) -> Figure:
    base = median_of(each.wall_s for each in usual)
    return median(name, [each.wall_s / base for each in ours], note=note)


def _there_and_back(bench: Bench, pod: Pod) -> tuple[list[_Cost], list[_Cost]]:
    pid, costs = pod.load_process().pid, []
    for _ in range(TIMES):
        for how in ("suspend", "resume"):
            before = _usage(pid)
            wall = move(bench, pod.name, how)
            after = _usage(pid)
            costs.append(
                _Cost(wall, *(b - a for a, b in zip(before[:2], after[:2], strict=True)), after[2] - before[2])
            )
    return costs[::2], costs[1::2]


def _usage(pid: int) -> tuple[float, float, int]:
    """Return a process's CPU time in user mode and in the kernel (s), and its page faults (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick, int(fields[7]) + int(fields[9])


def _at_once(bench: Bench, how: str, pods: Sequence[Pod]) -> float:
    names, began = [pod.name for pod in pods], time.monotonic()
    for name in names:
        bench.ask(f"pod.{how}", name=name)
    settled(bench, *names)
    took, wanted = time.monotonic() - began, {"suspend": "suspended", "resume": "running"}[how]
    for name in names:
        if (found := place(bench, name))["state"] != wanted:
            raise BenchError(f"pod {name}: {how}: it is {found['state']}: {found['state_error']}")
    return took


@contextmanager
def _huge_pages() -> Iterator[None]:
    """Let all memory of this host be huge pages for a while."""
    before = _HUGE_PAGES.read_text().split("[")[1].split("]")[0]
    _HUGE_PAGES.write_text("always")
    try:
        yield
    finally:
        _HUGE_PAGES.write_text(before)
