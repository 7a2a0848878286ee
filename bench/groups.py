"""(j) Share groups: programs side by side under one grant, beside plain sharing and MPS alone.

    python bench/groups.py                              # on a GPU with torch and MPS: six minutes, as root
    python bench/groups.py --only groups_isolation      # one section

Totals: torch programs as members of one group. Members have the same parts of the SMs as clients of plain MPS.
Isolation: a group beside a pod that floods, and an online pod beside a group of four. Kills: MPS, the guardian or the
daemon is killed at random moments beside a pod outside, or a member reads an illegal address; members that end are
started again, as a service manager would.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil
from attacks.build import build
from attacks.failures import guardians
from figures import Figure, at_least, at_most, median
from pods import BenchError, Pod, stop_all, tail, wait_for
from progress import Progress
from real_pairs import Alone, Pair, twice
from rivals import QGPU, Way, mps, mps_present
from script import NotHereError, Script, listed, run
from service import serve
from share_error import WINDOWS_NS
from torch_processes import SpanResult, TorchProcesses
from usage import errors_pp, watch

from qgpu.groups import mps_server
from qgpu.load.stats import percentile
from qgpu.nvidia import nvml

PAIRS = (
    twice("decoder-graph"),
    twice("decoder-eager"),
    twice("resnet-eager-16"),
    Pair("training-large", "service-eager"),
)
_REPEATS, _SPAN_S, _SETTLE_S = 3, 1.5, 0.5
_MEMBERS, _PLAINS, _CLIENTS = ("ga", "gb"), ("pa", "pb"), ("ma", "mb")
#: What is killed, how often, and the most seconds from the members' start to a kill.
_KILLS = {"server": 8, "mps": 10, "guardian": 8, "daemon": 8, "fault": 3}
_FLOODS, _LATEST_S = 2, 1.0
#: How long a member has to run or to end after a kill; how long the group has to take a new one.
_END_S, _RECOVERY_TIMEOUT_S = 5.0, 20.0
_TOLD = ("comm", "wchan", "syscall")
_MIB = 1 << 20


def totals(script: Script) -> list[Figure]:
    """Measure each pair under plain sharing and in a group, in turn; then by MPS without qgpu."""
    _need(script)
    programs = list(dict.fromkeys(name for pair in PAIRS for name in pair.programs))
    alone, found = Alone(), {pair.name: dict[str, list[SpanResult]]() for pair in PAIRS}
    with script.bench.daemon():
        workers = TorchProcesses(script)
        for name in _PLAINS:
            workers.outside(name, programs)
        _create(script, "group")
        for name in _MEMBERS:
            workers.member(name, "group", programs)
        workers.wait_ready()
        for program in programs:
            alone.add(program, workers.take({_PLAINS[0]: program}, 0.3, _SPAN_S))
        for pair in PAIRS:
            for _ in range(_REPEATS):
                for way, names in (("plain", _PLAINS), ("group", _MEMBERS)):
                    span = workers.take(dict(zip(names, pair.programs, strict=True)), _SETTLE_S, _SPAN_S)
                    found[pair.name].setdefault(way, []).append(span)
    with mps(script.bench) as service:
        workers = TorchProcesses(script)
        for name in _CLIENTS:
            workers.outside(name, programs, service.client())
        workers.wait_ready()
        for pair in PAIRS:
            for _ in range(_REPEATS):
                span = workers.take(dict(zip(_CLIENTS, pair.programs, strict=True)), _SETTLE_S, _SPAN_S)
                found[pair.name].setdefault("mps", []).append(span)
    return _total_figures(script, found, alone)


def _total_figures(
    script: Script, found: Mapping[str, Mapping[str, Sequence[SpanResult]]], alone: Alone
) -> list[Figure]:
    figures, ratios = [], {}
    for pair in PAIRS:
        sums = {
            way: [
                sum(
                    process.speed / alone.speed(name)
                    for process, name in zip(span.processes, pair.programs, strict=True)
                )
                for span in spans
            ]
            for way, spans in found[pair.name].items()
        }
        script.say(f"{pair.name}: sum of speeds over alone: " + "; ".join(f"{w} {listed(s)}" for w, s in sums.items()))
        tag = pair.name.replace(" ", "_").replace("-", "_").replace("+", "and")
        figures += [
            median(f"group_sum_{way}_{tag}", values, note=f"{pair.name}, {way}") for way, values in sums.items()
        ]
        ratios[pair.name] = statistics.median(sums["group"]) / statistics.median(sums["mps"])
        figures.append(Figure(f"group_total_over_mps_{tag}", ratios[pair.name], note=f"{pair.name}; medians"))
    worst = min(ratios, key=lambda name: ratios[name])
    told = f"sum of both speeds in a group over that by MPS alone; least of {len(ratios)} pairs: {worst}"
    return [median("group_total_over_mps", [ratios[worst]], *at_least(0.97), note=told), *figures]


def isolation(script: Script) -> list[Figure]:
    """Measure what a group does to pods outside of it."""
    _need(script)
    script.calibrate(["1ms", "100us"])
    figures = []
    with script.bench.daemon():
        _create(script, "half", cores=50)
        inside = [_flooding(script, f"in{n}", "half") for n in range(2)]
        outside = script.bench.pod("outside", "1ms", cores=50)
        script.running(outside)
        script.settle(2)
        ticks = watch(script.bench, 6 * script.scale)
        errors = errors_pp(ticks, {"half": 50, "outside": 50}, WINDOWS_NS["1s"])
        script.say(f"group and pod at 50/50: pp off {listed(errors[-5:])}")
        told = "a group of two floods and a flood outside at 50/50; all windows of 1 s"
        figures.append(median("group_share_error_pp_p99", [percentile(errors, 99)], *at_most(1, " pp"), note=told))
        stop_all(outside)
        _end(script, "half", inside)
        _create(script, "four")
        way = Way(QGPU, script)
        quiet = serve(way, "100us", 2.0).p99_us
        four = [_flooding(script, f"m{n}", "four") for n in range(4)]
        script.settle(2)
        added = [serve(way, "100us", 3.0).p99_us - quiet for _ in range(2)]
        script.say(f"online beside a group of four: p99 {quiet:.0f} us alone, added {listed(added)}")
        told = "100 µs every 10 ms beside a group of four members that flood 1 ms; p99 over that alone"
        figures.append(median("group_online_p99_added_us", added, *at_most(300, " µs"), note=told))
        _end(script, "four", four)
    return figures


def kills(script: Script) -> list[Figure]:
    """Kill parts of a group and of qgpu at random moments; a pod outside goes on, and the group takes members again."""
    _need(script)
    script.calibrate(["1ms"])
    dice = random.Random(1)  # noqa: S311
    order = dice.sample([what for what, times in _KILLS.items() for _ in range(times)], sum(_KILLS.values()))
    killed, stuck, again, faults = 0, 0, [], []
    build(script.bench.directory)
    with script.bench.daemon():
        free = _free(script)
        _create(script, "half", cores=50)
        outside = script.bench.pod("outside", "1ms", cores=50)
        script.running(outside)
        members: list[Pod] = []
        began = time.time()
        for number, what in enumerate(order):
            members = _restarted(script, members, f"k{number}")
            script.settle(dice.uniform(0, _LATEST_S))
            at = time.time()
            killed += _kill(script, what)
            before = len(members)
            members, left = _settled(script, members, what)
            stuck += left
            if what == "fault":
                faults.append(before - len(members))
            # Otherwise the next members would start while MPS starts.
            if what in ("server", "mps") and number % 2:
                again.append(_takes_members(script, f"a{number}") - at)
        ended = time.time()
        lives = outside.process.poll() is None
        progress = stop_all(outside)[0] if lives else None
        _end(script, "half", members)
        left_over = _left_over(script, free)
    pauses = _pauses_ms(progress, began, ended) if progress is not None else [1000 * (ended - began)]
    script.say(
        f"{killed} kills; longest pauses outside, ms: {listed(pauses[-5:])}; left over: {left_over or 'nothing'}"
    )
    told = f"{killed} SIGKILLs: {', '.join(f'{what} {times}' for what, times in _KILLS.items())} times; fault: no kill"
    return [
        median("group_kills", [killed], *at_least(30), note=told),
        median("fault_outside_steps_lost", [float(not lives)], *at_most(0), note="the pod outside ended or went on"),
        median("group_outside_pause_ms", [pauses[-1]], *at_most(1000, " ms"), note="longest, outside"),
        median("group_members_ended_by_fault", faults, note=f"of {_FLOODS} others, when a member's kernel faults"),
        Figure("group_members_stuck", stuck, note="neither ran nor ended; killed by the script"),
        median("group_again_s", again, note="from the kill to a new member that has run a kernel"),
        median("group_left_over", [len(left_over)], *at_most(0), note="processes, pods, memory"),
    ]


def _restarted(script: Script, members: Sequence[Pod], name: str) -> list[Pod]:
    """Replace the members that have ended."""
    kept = [member for member in members if member.process.poll() is None]
    return kept + [_flooding(script, f"{name}-{n}", "half") for n in range(_FLOODS - len(kept))]


def _kill(script: Script, what: str) -> int:
    """Kill MPS's server, all of its processes, the guardian or the daemon, or let a member fault; count the killed."""
    bench = script.bench
    if what == "daemon":
        bench.kill_daemon()
        bench.start_daemon()
        return 1
    if what == "fault":
        command = [str(bench.directory / "fault"), "illegal-address", str(bench.directory / "report"), "0"]
        member = bench.start_member("fault", command, "half")
        with suppress(subprocess.TimeoutExpired):
            member.process.wait(_END_S)
        member.end()
        return 0
    if what == "guardian":
        pids = [process.pid for process in guardians(bench)]
    else:
        pids = _mps_pids(script, "half", what == "server")
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def _settled(script: Script, members: Sequence[Pod], what: str) -> tuple[list[Pod], int]:
    """Wait until each member runs or has ended; kill those that do neither. Return the ones that run, and how many."""
    until = time.monotonic() + _END_S
    said = {member.name: member.log.stat().st_size for member in members}
    waiting = list(members)
    while waiting and time.monotonic() < until:
        time.sleep(0.05)
        waiting = [
            member
            for member in waiting
            if member.process.poll() is None and member.log.stat().st_size <= said[member.name]
        ]
    for member in waiting:
        script.say(f"{member.name} neither runs nor ends after {what}: {_state(member)}")
        with suppress(BenchError, psutil.Error):
            member.load_process().kill()
        member.process.kill()
        member.process.wait(20)
    return [member for member in members if member.process.poll() is None], len(waiting)


def _state(member: Pod) -> str:
    """Describe a member's processes and their threads, as an engineer would look for them."""
    told = [tail(member.log)]
    with suppress(psutil.Error):
        top = psutil.Process(member.process.pid)
        for process in (top, *top.children(recursive=True)):
            files = {file.path for file in process.open_files() if "nvidia" in file.path}
            sockets = len(process.net_connections("unix"))
            told.append(f"{process.pid} {process.status()} {sorted(files)} {sockets} sockets")
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                with suppress(OSError):
                    told.append(" ".join((thread / name).read_text().strip() for name in _TOLD))
    return "; ".join(told)


def _takes_members(script: Script, name: str) -> float:
    """Wait until the group takes a member, started as often as it fails; return when one has run (s)."""
    until = time.monotonic() + _RECOVERY_TIMEOUT_S
    while time.monotonic() < until:
        member = _flooding(script, name, "half")
        with suppress(BenchError):
            member.wait_log('"elapsed_s"', 6)
            ran_s = float(json.loads(member.log.read_text().strip().splitlines()[-1])["elapsed_s"])
            began = time.time() - ran_s
            member.end()
            return began
        member.end()
    raise BenchError("the group takes no members after a kill")


def _pauses_ms(progress: Progress, start: float, end: float) -> list[float]:
    """Return for how long no kernel of the pod outside finished, ascending."""
    done = [when for when, kernels in progress.counts() if kernels and start <= when < end]
    return sorted(1000 * (after - before) for before, after in pairwise(done))


def _left_over(script: Script, free: int) -> list[str]:
    """Return what a removed group has left: processes, pods, bytes of the card."""
    names = [process.name() for process in script.bench.processes() if "mps" in process.name()]
    names += [pod["name"] for pod in script.bench.pods()]
    missing = free - _free(script)
    return names + ([f"{missing} bytes"] if missing > _MIB else [])


def _free(script: Script) -> int:
    return nvml.free_memory(script.bench.ask("gpu.list")["gpus"][0]["uuid"])


def _mps_pids(script: Script, group: str, server_only: bool) -> list[int]:
    """List the processes of a group's MPS. While qgpu starts MPS anew, the group has no pod for a moment."""
    pids: list[int] = []

    def found() -> bool:
        pids.extend(pid for pod in script.bench.pods() if pod["name"] == group for pid in pod["pids"])
        return bool(pids)

    wait_for(f"the group {group}", found, _RECOVERY_TIMEOUT_S)
    return [pid for pid in pids if (mps_server.is_mps_server if server_only else mps_server.is_mps)(pid)]


def _create(script: Script, name: str, cores: int | None = None) -> None:
    script.bench.ctl("group", "create", name, *(("--cores", str(cores)) if cores else ()))


def _flooding(script: Script, name: str, group: str) -> Pod:
    return script.bench.start_member(name, script.bench.load_command("1ms", "--watch"), group)


def _end(script: Script, group: str, members: Sequence[Pod]) -> None:
    for member in members:
        member.end()
    script.bench.ctl("group", "remove", group)


def _need(script: Script) -> None:
    if script.bench.simulated or not mps_present():
        raise NotHereError("needs a GPU and MPS")


SECTIONS = {"groups_totals": totals, "groups_isolation": isolation, "groups_kills": kills}

if __name__ == "__main__":
    sys.exit(run("groups", SECTIONS, __doc__ or "", apart=list(SECTIONS)))
