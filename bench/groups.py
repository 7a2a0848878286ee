"""(j) Share groups: programs side by side under one grant, beside plain sharing and MPS alone.

    python bench/groups.py                              # on a GPU with torch and MPS: four minutes, as root
    python bench/groups.py --only groups_isolation      # one section

Totals: torch programs as members of one group with half of the SMs each where MPS is limited, too. Isolation: a group
beside a pod that floods, an online pod beside a group of four, and members whose MPS server is killed.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

from figures import Figure, at_least, at_most, median
from pods import BenchError, Pod, stop_all
from real_pairs import Alone, Pair, twice
from rivals import QGPU, Way, mps, mps_present
from script import NotHereError, Script, listed, run
from service import serve
from share_error import WINDOWS_NS
from torch_side import Crew, Taken
from usage import errors_pp, watch

from qgpu.load.stats import percentile

PAIRS = (
    twice("decoder-graph"),
    twice("decoder-eager"),
    twice("resnet-eager-16"),
    Pair("training-large", "service-eager"),
)
_REPEATS, _SPAN_S, _SETTLE_S = 3, 1.5, 0.5
_MEMBERS, _PLAINS, _CLIENTS = ("ga", "gb"), ("pa", "pb"), ("ma", "mb")
_KILLS, _END_S = 8, 3.0


def totals(script: Script) -> list[Figure]:
    """Measure each pair plainly and in a group, in turn; then by MPS without qgpu."""
    _need(script)
    programs = list(dict.fromkeys(name for pair in PAIRS for name in pair.programs))
    alone, found = Alone(), {pair.name: dict[str, list[Taken]]() for pair in PAIRS}
    with script.bench.daemon():
        crew = Crew(script)
        for name in _PLAINS:
            crew.beside(name, programs)
        _create(script, "group")
        for name in _MEMBERS:
            crew.member(name, "group", programs)
        crew.wait_ready()
        for program in programs:
            alone.add(program, crew.take({_PLAINS[0]: program}, 0.3, _SPAN_S))
        for pair in PAIRS:
            for _ in range(_REPEATS):
                for way, names in (("plain", _PLAINS), ("group", _MEMBERS)):
                    taken = crew.take(dict(zip(names, pair.programs, strict=True)), _SETTLE_S, _SPAN_S)
                    found[pair.name].setdefault(way, []).append(taken)
    with mps(script.bench) as service:
        crew = Crew(script)
        for name in _CLIENTS:
            crew.beside(name, programs, service.client())
        crew.wait_ready()
        for pair in PAIRS:
            for _ in range(_REPEATS):
                taken = crew.take(dict(zip(_CLIENTS, pair.programs, strict=True)), _SETTLE_S, _SPAN_S)
                found[pair.name].setdefault("mps", []).append(taken)
    return _total_figures(script, found, alone)


def _total_figures(script: Script, found: Mapping[str, Mapping[str, Sequence[Taken]]], alone: Alone) -> list[Figure]:
    figures, ratios = [], {}
    for pair in PAIRS:
        sums = {
            way: [
                sum(did.speed / alone.speed(name) for did, name in zip(taken.did, pair.programs, strict=True))
                for taken in spans
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
    """Measure what a group does to pods outside of it, and what becomes of it when its server is killed."""
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
        figures += _killed(script, inside, outside)
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


def _killed(script: Script, members: list[Pod], outside: Pod) -> list[Figure]:
    """Kill the group's MPS server several times; the pod outside goes on, and the group takes members again."""
    stalls, lost, went_on = [], 0, 0
    for number in range(_KILLS):
        before = time.time()
        for pid in _mps_pids(script, "half"):
            os.kill(pid, signal.SIGKILL)
        went_on += _ended(members)
        lost += outside.process.poll() is not None
        again = time.monotonic() + 20
        while True:
            members[:] = [_flooding(script, f"k{number}-{n}", "half") for n in range(2)]
            time.sleep(1.0)
            if all(member.process.poll() is None for member in members):
                break
            if time.monotonic() > again:
                raise BenchError("the group takes no members after its server was killed")
        stalls.append(time.time() - before)
    told = f"{_KILLS} kills of a group's MPS daemon and server; pods outside that ended"
    return [
        median("fault_outside_steps_lost", [float(lost)], *at_most(0), note=told),
        Figure("members_that_outlived_the_server", went_on, note=f"of {2 * _KILLS}, within {_END_S} s of a kill"),
        median("group_again_s", stalls, note="from the kill to members that ran for a second"),
    ]


def _ended(members: Sequence[Pod]) -> int:
    """Wait until members have ended; end those that go on, and return their number."""
    until = time.monotonic() + _END_S
    while time.monotonic() < until and any(member.process.poll() is None for member in members):
        time.sleep(0.05)
    left = [member for member in members if member.process.poll() is None]
    for member in left:
        member.process.terminate()
    for member in left:
        member.process.wait(20)
    return len(left)


def _mps_pids(script: Script, group: str) -> list[int]:
    (pod,) = [pod for pod in script.bench.pods() if pod["name"] == group]
    found = []
    for pid in pod["pids"]:
        try:
            with open(f"/proc/{pid}/comm") as comm:
                found += [pid] * comm.read().startswith("nvidia-cuda-mps")
        except OSError:
            continue
    return found


def _create(script: Script, name: str, cores: int | None = None) -> None:
    script.bench.ctl("group", "create", name, *(("--cores", str(cores)) if cores else ()))


def _flooding(script: Script, name: str, group: str) -> Pod:
    return script.bench.start_member(name, script.bench.load_command("1ms"), group)


def _end(script: Script, group: str, members: Sequence[Pod]) -> None:
    for member in members:
        member.process.terminate()
    for member in members:
        member.process.wait(20)
    script.bench.ctl("group", "remove", group)


def _need(script: Script) -> None:
    if script.bench.simulated or not mps_present():
        raise NotHereError("needs a GPU and MPS")


SECTIONS = {"groups_totals": totals, "groups_isolation": isolation}

if __name__ == "__main__":
    sys.exit(run("groups", SECTIONS, __doc__ or "", apart=list(SECTIONS)))
