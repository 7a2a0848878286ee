"""Pods that leave the card and come back: how long that takes beside the driver's own, and that nothing is lost.

    python bench/memory.py                       # as root, on a GPU; the section bit_exact needs torch; ten minutes
    python bench/memory.py --only moves          # one section
    python bench/memory.py --plane sim           # a rehearsal on a simulated pGPU

``moves``: a plain process and one in a pod, of one size, in turn: the driver's calls made by a helper outside of qgpu,
and ``pod.suspend`` and ``pod.resume``, each from the request to the end. Both start a process that loads libcuda.
``bit_exact``: programs that are suspended while they run give the bits that they give undisturbed.
``moments``: daemon, guardian and helpers are killed while pods move; then every pod must run or be suspended, and all
must run in the end.
``short``: an online pod of 20 GiB starts on a card full of offline memory, and on one with room.
``twice``: two jobs that do not fit together take turns, the least turn shortened to 20 s: their work beside that of one
job alone.
``cards``: on a host with two cards of one model, a pod moves between them beside the driver's own move of a plain
process, programs move while they run, and a card is drained; ``cards_moments``: kills while pods move so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from statistics import median as median_of
from typing import Any

import psutil
from attacks.safe import guardians
from figures import Asked, Figure, at_least, at_most, median
from harness import QGPUD, ROOT, Bench
from pods import BenchError, Pod, stop_all, tail, wait_for
from script import NotHereError, Script, listed, run

from qgpu.checkpoint.helper import Helper
from qgpu.errors import QgpuError
from qgpu.nvidia import nvml

GIB, MIB = 1 << 30, 1 << 20
SIZE_GIB = 8
REPEATS = 3
#: A kernel now and then: the card has time for both processes.
LOAD = ("--memory", f"{SIZE_GIB}GiB", "--period", "10ms")
SMALL = ("--memory", "512MiB", "--period", "10ms")
#: What a pod's limit leaves beyond what its load holds: a context.
ROOM_GIB = 1
PATIENCE_S = 90.0

PROGRAMS = {"training": 800, "decoder": 5000, "two": 500}
#: How often each program is suspended.
TIMES = 3

PODS = 6
ROUNDS = {"daemon": 6, "guardian": 6, "helpers": 12}
#: A move between cards takes as long as both ways of a suspension.
CARDS_ROUNDS = {"daemon": 3, "guardian": 3, "helpers": 4}
#: What a pod that moves between cards holds, in GiB.
CARDS_GIB = 16
#: When a kill comes after the requests: from before the first call to after the last.
LATEST_S = 1.0

#: Offline pods that fill the card, and the online pod that has no room beside them: what each holds, in GiB. A limit
#: leaves a GiB for the context.
OFFLINE_GIB, ONLINE_GIB = 22, 19
#: Each of two jobs may have this part of the card, and has so many GiB.
JOB_PART, JOB_GIB = 0.6, 1
TURN_S, CYCLES = 20, 2
#: A job without kernels for so long is off the card.
OFF_S = 1.0
_SHORT_TURNS = "from qgpu.policies import memory_turns; memory_turns.TURN_NS = {ns}; "


# Moves


def moves(script: Script) -> list[Figure]:
    """Move a pod and a plain process of one size in turn."""
    bench = script.bench
    with bench.daemon():
        free = _free(bench)
        pod = bench.pod("moved", "100us", *LOAD, memory=f"{SIZE_GIB + ROOM_GIB}GiB")
        script.running(pod)
        pod_off, pod_back, left, driver_off, driver_back = [], [], [], [], []
        pod_off.append(_move(bench, "moved", "suspend"))
        left.append((free - _free(bench)) / MIB)  # nothing else is on the card
        pod_back.append(_move(bench, "moved", "resume"))
        plain = None if bench.simulated else bench.beside("plain", "100us", *LOAD)
        if plain is not None:
            script.running_beside(plain)
        for _ in range(REPEATS):
            if plain is not None:
                off, back = _driver(plain.load_process().pid)
                driver_off.append(off)
                driver_back.append(back)
            pod_off.append(_move(bench, "moved", "suspend"))
            pod_back.append(_move(bench, "moved", "resume"))
        script.say(f"pod off {listed(pod_off)} s, back {listed(pod_back)} s; left {listed(left)} MiB")
        script.say(f"driver off {listed(driver_off)} s, back {listed(driver_back)} s")
        script.running(pod)
    what = f"a process with {SIZE_GIB} GiB"
    figures = [
        median("suspend_s_per_gib", [each / SIZE_GIB for each in pod_off], note=f"{what}, in a pod"),
        median("resume_s_per_gib", [each / SIZE_GIB for each in pod_back], note=f"{what}, in a pod"),
        median("suspended_left_mib", left, *at_most(600), note=f"of the card's memory, {what}, in a pod"),
    ]
    if driver_off:
        note = f"{what}: pod.suspend or pod.resume over the driver's own calls, in turn"
        # The first move of the pod was before those of the plain process.
        figures += [
            _over("suspend_over_driver", pod_off[1:], driver_off, note),
            _over("resume_over_driver", pod_back[1:], driver_back, note),
            median("driver_suspend_s_per_gib", [each / SIZE_GIB for each in driver_off], note=f"{what}, no pod"),
            median("driver_resume_s_per_gib", [each / SIZE_GIB for each in driver_back], note=f"{what}, no pod"),
        ]
    return figures


def _over(name: str, ours: Sequence[float], theirs: Sequence[float], note: str) -> Figure:
    return median(name, [a / b for a, b in zip(ours, theirs, strict=True)], *at_most(1.1), note=note)


def _driver(pid: int, moves: Mapping[str, str] | None = None) -> tuple[float, float]:
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
            helper.call(call, PATIENCE_S, pid=pid, **arguments)
        took.append(time.monotonic() - began)
        helper.close()
    return took[0], took[1]


def _move(bench: Bench, name: str, how: str) -> float:
    """Suspend or resume a pod; return how long that took in s."""
    began = time.monotonic()
    bench.ask(f"pod.{how}", name=name)
    _settled(bench, name)
    found = _place(bench, name)
    if found["state"] != {"suspend": "suspended", "resume": "running"}[how]:
        raise BenchError(f"pod {name}: {how}: it is {found['state']}: {found['state_error']}")
    return time.monotonic() - began


def _place(bench: Bench, name: str) -> dict[str, Any]:
    for pod in bench.pods():
        if pod["name"] == name:
            return pod
    raise BenchError(f"pod {name} is gone")


def _settled(bench: Bench, *names: str) -> None:
    """Wait until no pod is on the way."""

    def done() -> bool:
        try:
            return all(_place(bench, name)["state"] in ("running", "suspended") for name in names)
        except QgpuError:  # a guardian is being replaced
            return False

    wait_for(f"pods {', '.join(names)} to arrive", done, PATIENCE_S)


def _free(bench: Bench, gpu: int = 0) -> int:
    """Return the free bytes of a pGPU."""
    card = next(card for card in bench.ask("gpu.list")["gpus"] if card["index"] == gpu)
    if bench.simulated:
        held: Iterator[int] = (use["memory"] for pod in bench.pods() for use in pod["usage"] if use["gpu"] == gpu)
        return int(card["memory"]) - sum(held)
    return nvml.free_memory(card["uuid"])


# Bits


def bit_exact(script: Script) -> list[Figure]:
    """Compare programs that are suspended while they run to undisturbed ones."""
    if script.bench.simulated or importlib.util.find_spec("torch") is None:
        raise NotHereError("torch on a GPU is needed")

    def there_and_back(name: str, _turn: int) -> None:
        _move(script.bench, name, "suspend")
        _move(script.bench, name, "resume")

    with script.bench.daemon():
        return [_same_bits(script, "bit_exact", there_and_back, "suspended")]


def _same_bits(script: Script, figure: str, disturb: Callable[[str, int], None], how: str) -> Figure:
    """Run all programs undisturbed, and again while ``disturb`` gets their pods' names and turns from 0; compare."""
    wanted = _results(script, "calm", lambda _: None)
    times = dict.fromkeys(PROGRAMS, 0)

    def disturb_one(program: str, pod: Pod) -> None:
        try:
            for turn in range(TIMES):
                _wait_step(pod, PROGRAMS[program] * (turn + 1) // (TIMES + 2))
                disturb(pod.name, turn)
                times[program] += 1
        except (BenchError, QgpuError) as error:
            script.say(f"{program}, {how} {times[program]} times: {error}")

    def disturb_all(pods: dict[str, Pod]) -> None:
        threads = [threading.Thread(target=disturb_one, args=each) for each in pods.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    got = _results(script, how, disturb_all)
    same = [name for name in PROGRAMS if got[name] == wanted[name] and times[name]]
    script.say(f"{how} {times} times; the same bits: {', '.join(same) or 'none'}")
    note = f"of {', '.join(PROGRAMS)}: the part that gave the same bits; {how} {min(times.values())} times or more"
    return Figure(figure, len(same) / len(PROGRAMS), (), "= 1", len(same) == len(PROGRAMS), note)


def _results(script: Script, name: str, disturb: Callable[[dict[str, Pod]], None]) -> dict[str, list[str]]:
    """Run all programs at once, each in a pod, and return what each found."""
    bench = script.bench
    pods = {
        program: bench.start_pod(
            f"{name}-{program}",
            [sys.executable, str(ROOT / "bench" / "memory_programs.py"), program, "--steps", str(steps)],
        )
        for program, steps in PROGRAMS.items()
    }
    for pod in pods.values():
        _wait_step(pod, 0)
    disturb(pods)
    results = {}
    for program, pod in pods.items():
        if pod.process.wait(PATIENCE_S):
            raise BenchError(f"{program}: {pod.log.read_text()[-300:]}")
        results[program] = json.loads(pod.file.read_text())["result"]
    return results


def _wait_step(pod: Pod, step: int) -> None:
    pod.wait_log(f"step {step}\n", PATIENCE_S)


# Moments


def moments(script: Script) -> list[Figure]:
    """Kill daemon, guardian and helpers while pods move; count what is lost."""
    bench = script.bench
    if bench.simulated:
        raise NotHereError(
            "a simulated card ends with its daemon; tests/checkpoint/test_kills.py kills on fake processes"
        )

    def begin(name: str) -> None:
        how = "suspend" if _place(bench, name)["state"] == "running" else "resume"
        bench.ask(f"pod.{how}", name=name, **({"work_ns": 10**9} if how == "suspend" else {}))

    return _kills(script, ROUNDS, begin, at_least(60))


def _kills(
    script: Script,
    of_each: Mapping[str, int],
    begin: Callable[[str], None],
    enough: Asked,
) -> list[Figure]:
    """Kill ``of_each`` what it says, in a random order, while pods are on the way that ``begin`` sends them."""
    bench, dice = script.bench, random.Random(1)  # noqa: S311
    names = [f"pod-{number}" for number in range(PODS)]
    met: dict[str, int] = dict.fromkeys(of_each, 0)
    killed = lost = 0
    with bench.daemon():
        indexes = [card["index"] for card in bench.ask("gpu.list")["gpus"]]
        before = sum(_free(bench, index) for index in indexes)
        pods = [bench.pod(name, "100us", *SMALL, memory=f"{1 + ROOM_GIB}GiB") for name in names]
        script.running(*pods)
        every = [kind for kind, rounds in of_each.items() for _ in range(rounds)]
        for what in dice.sample(every, len(every)):
            for name in names:
                try:
                    begin(name)
                except QgpuError as error:
                    script.say(f"{name}: {error}")
            time.sleep(dice.uniform(0, LATEST_S))
            met[what] += sum(_place(bench, name)["state"] not in ("running", "suspended") for name in names)
            killed += _kill(script, what)
            _settled(bench, *names)
        for name in names:
            if _place(bench, name)["state"] == "suspended":
                try:
                    _move(bench, name, "resume")
                except (BenchError, QgpuError) as error:
                    script.say(f"resume: {error}")
        for pod in pods:
            try:
                bench.wait_busy(pod)
            except BenchError as error:
                script.say(f"lost: {error}")
                lost += 1
        bench.end_pods()

        def left() -> int:
            return before - sum(_free(bench, index) for index in indexes)

        with suppress(BenchError):
            wait_for("the cards to be empty", lambda: left() < MIB, 10)
        leaked = max(0, left())
    total = sum(met.values())
    script.say(f"{killed} kills, {total} pods met on the way: {met}; {lost} lost; {leaked} bytes left")
    return [
        median("kills", [killed], *enough, note=f"SIGKILLs, {dict(of_each)} rounds, {PODS} pods"),
        median("moments", [total], *enough, note=f"pods on the way when something was killed: {met}"),
        median("pods_lost", [lost], *at_most(0), note="pods that do not run in the end"),
        median("memory_leaked_bytes", [leaked], *at_most(0), note="of the cards, when all pods have ended"),
    ]


# Between two cards


def _need_two_cards(script: Script) -> None:
    bench = script.bench
    if bench.simulated:
        bench.qgpud = [*QGPUD, "--sim-gpus", "2"]
    with bench.daemon():
        models = [(card["name"], card["memory"]) for card in bench.ask("gpu.list")["gpus"]]
    if len(models) < 2 or models[0] != models[1]:
        raise NotHereError(f"pGPUs 0 and 1 must be of one model; there are {', '.join(name for name, _ in models)}")


def _to(bench: Bench, name: str, gpu: int) -> float:
    """Move a pod to a card; return how long that took in s."""
    began = time.monotonic()
    bench.ask("pod.move", **{"name": name, "gpu": gpu, "from": None})
    _settled(bench, name)
    took, found = time.monotonic() - began, _place(bench, name)
    on = [grant["gpu"] for grant in found["grants"]]
    if found["state"] != "running" or on != [gpu]:
        raise BenchError(f"pod {name}: it is {found['state']} on pGPU {on}, not on {gpu}: {found['state_error']}")
    return took


def cards(script: Script) -> list[Figure]:
    """Move a pod and a plain process between two cards in turn, then programs while they run; drain a card."""
    _need_two_cards(script)
    bench = script.bench
    holds = ("--memory", f"{CARDS_GIB}GiB", "--period", "10ms")
    took, driver, left, charged = [], [], [], []
    with bench.daemon():
        uuids = [card["uuid"] for card in bench.ask("gpu.list")["gpus"]]
        exchange = {**{uuid: uuid for uuid in uuids}, uuids[0]: uuids[1], uuids[1]: uuids[0]}
        free = _free(bench)
        pod = bench.pod("moved", "100us", *holds, memory=f"{CARDS_GIB + ROOM_GIB}GiB")
        script.running(pod)
        took.append(_to(bench, "moved", 1))
        left.append((free - _free(bench)) / MIB)  # nothing else is on that card
        bench.wait_busy(pod)
        plain = None if bench.simulated else bench.beside("plain", "100us", *holds)
        if plain is not None:
            script.running_beside(plain)
        for turn in range(max(1, round(2 * script.scale))):
            if plain is not None:
                try:
                    driver.append(sum(_driver(plain.load_process().pid, exchange)))
                except QgpuError as error:
                    script.say(f"the driver's own move: {error}")
            took.append(_to(bench, "moved", turn % 2))
            bench.wait_busy(pod)
            charged.append(bench.ask("gpu.list")["gpus"][1 - turn % 2]["memory_used"] / MIB)
        script.say(f"moves {listed(took)} s, the driver's own {listed(driver)} s; left {listed(left)} MiB")
        pod.end()
        if plain is not None:
            plain.end()
        small = [bench.pod(f"drained-{number}", "100us", *SMALL) for number in range(4)]
        script.running(*small)
        began = time.monotonic()
        bench.ctl("gpu", "drain", "0")
        drained = time.monotonic() - began
        bench.wait_busy(*small)
        for each in small:
            each.end()
        same = [] if bench.simulated else [_same_bits(script, "move_bit_exact", _to_other(bench), "moved")]
    what = f"a process with {CARDS_GIB} GiB"
    note = f"{what}, between two cards of one model"
    figures = [
        median("move_s", took, note=f"{note}, in a pod, which goes on there"),
        median("moved_left_mib", left, note=f"of the card's memory that {what} left"),
        median("moved_charged_mib", charged, *at_most(0), note="what pods are charged on the card that it left"),
        median("drain_s", [drained], note=f"gpu drain: {len(small)} pods with 512 MiB each move, and go on"),
    ]
    if driver:
        figures.append(median("driver_move_s", driver, note=f"{note}, no pod"))
    return figures + same


def _to_other(bench: Bench) -> Callable[[str, int], None]:
    """Return what moves a pod to the card that it is not on: it begins on the first."""

    def move(name: str, turn: int) -> None:
        _to(bench, name, 1 - turn % 2)

    return move


def cards_moments(script: Script) -> list[Figure]:
    """Kill daemon, guardian and helpers while pods move between two cards; count what is lost."""
    if script.bench.simulated:
        raise NotHereError("a simulated card ends with its daemon")
    _need_two_cards(script)
    bench = script.bench

    def begin(name: str) -> None:
        place = _place(bench, name)
        on = {grant["gpu"] for grant in place["grants"]}
        if place["state"] == "suspended":
            bench.ask("pod.resume", name=name)
        elif len(on) == 1:
            bench.ask("pod.move", **{"name": name, "gpu": 1 - min(on), "from": None})

    few = sum(CARDS_ROUNDS.values())
    return [replace(each, name=f"cards_{each.name}") for each in _kills(script, CARDS_ROUNDS, begin, at_least(few))]


# More memory than there is


def short(script: Script) -> list[Figure]:
    """Start an online pod on a card full of offline memory, and on one with room."""
    bench = script.bench
    if bench.simulated:
        raise NotHereError("starts and moves take their time on a card only")
    size, times = f"{OFFLINE_GIB}GiB", max(1, round(2 * script.scale))
    with bench.daemon():
        bench.ctl("gpu", "policy", "set", "0", "--memory-overcommit", "2.0")
        with_room = [_online_start_s(bench) for _ in range(times + 1)]
        plain = bench.beside("plain", "100us", "--memory", size, "--period", "10ms")
        script.running_beside(plain)
        driver = [_driver(plain.load_process().pid)[0] for _ in range(times)]
        plain.end()
        card = bench.ask("gpu.list")["gpus"][0]["memory"]
        limit = f"{OFFLINE_GIB + 1}GiB"
        pods = [
            bench.pod(f"offline-{number}", "1ms", "--memory", size, memory=limit)
            for number in range(int(card // ((OFFLINE_GIB + 1) * GIB)))
        ]
        script.running(*pods)
        script.say(f"{len(pods)} offline pods; {_free(bench) / GIB:.1f} GiB free")
        took = []
        for _ in range(times):
            took.append(_online_start_s(bench))
            wait_for("the offline pods to come back", lambda: _all_run(bench), PATIENCE_S)
        lost = sum(pod.process.poll() is not None for pod in pods)
    script.say(f"start with room {listed(with_room)} s, without {listed(took)} s; driver off {listed(driver)} s")
    waited = [each - median_of(with_room) for each in took]
    note = f"an online pod of {ONLINE_GIB} GiB, beside offline pods of {OFFLINE_GIB} GiB each"
    return [
        median("online_start_with_room_s", with_room, note="the same on an empty card; to the first kernel's end"),
        median("online_start_short_of_memory_s", took, note=f"{note}, that fill the card; to the first kernel's end"),
        median(
            "online_wait_over_driver",
            [each / median_of(driver) for each in waited],
            *at_most(1.2),
            note=f"what that start takes longer, over the driver's own checkpoint of {OFFLINE_GIB} GiB",
        ),
        median("short_pods_lost", [lost], *at_most(0), note="offline pods that ended"),
    ]


def _online_start_s(bench: Bench) -> float:
    """Start an online pod, and end it; return how long it took to its first kernel's end, in s."""
    began = time.time()
    pod = bench.pod(
        "online", "100us", "--memory", f"{ONLINE_GIB}GiB", memory=f"{ONLINE_GIB + 1}GiB", pod_class="online"
    )
    wait_for("the online pod to run", lambda: _has_run(bench, pod), PATIENCE_S)
    return float(pod.stop().result["started_ns"]) / 1e9 - began


def _has_run(bench: Bench, pod: Pod) -> bool:
    if pod.process.poll() is not None:
        raise BenchError(f"pod {pod.name}: ended: {tail(pod.log)}")
    return bench.used_ns().get(pod.name, 0) > 0


def _all_run(bench: Bench) -> bool:
    return all(pod["state"] == "running" for pod in bench.pods())


def twice(script: Script) -> list[Figure]:
    """Let two jobs that do not fit together take turns, and count the kernels of both."""
    bench = script.bench
    if bench.simulated:
        raise NotHereError("moves take their time on a card only")
    bench.qgpud = [sys.executable, "-c", _SHORT_TURNS.format(ns=TURN_S * 10**9) + QGPUD[-1]]
    cycles = max(1, round(CYCLES * script.scale))
    with bench.daemon():
        bench.ctl("gpu", "policy", "set", "0", "--memory-overcommit", "2.0")
        memory = f"{int(bench.ask('gpu.list')['gpus'][0]['memory'] * JOB_PART) >> 20}MiB"
        jobs = [bench.pod("first", "1ms", "--memory", f"{JOB_GIB}GiB", memory=memory)]
        script.running(*jobs)
        alone = script.span(5)
        jobs.append(bench.pod("second", "1ms", "--memory", f"{JOB_GIB}GiB", memory=memory))
        began = time.monotonic()
        # A turn lasts TURN_S, or nineteen times the pod's move if that is longer; a loaded host takes longer still.
        wait_for("the second job to begin", lambda: bench.used_ns().get("second", 0) > 0, 3 * TURN_S)
        turn_s = time.monotonic() - began
        script.settle(2 * cycles * 1.3 * turn_s + 5)
        done = stop_all(*jobs)
    bench.qgpud = QGPUD
    first, second = done
    runs = [
        after for before, after in pairwise([0.0, *(at for at, n in second.counts() if n)]) if after - before > OFF_S
    ]
    script.say(f"the second job came {len(runs)} times, after {listed([b - a for a, b in pairwise(runs)])} s")
    if len(runs) <= 1:
        raise BenchError("the second job came once only")
    last = min(cycles, len(runs) - 1)
    kernels = sum(job.between(runs[0], runs[last]) for job in done)
    parts = [job.between(runs[0], runs[last]) / kernels for job in done]
    rate = first.between(alone.start, alone.end) / (alone.end - alone.start)
    value = kernels / (runs[last] - runs[0]) / rate
    note = (
        f"kernels of two jobs of {JOB_GIB} GiB, each with a limit of {JOB_PART:.0%} of the card, over {last} times two "
        f"turns of at least {TURN_S} s, over those of one alone; parts {parts[0]:.2f} and {parts[1]:.2f}"
    )
    return [median("overcommit_2x_throughput", [value], *at_least(0.9), note=note)]


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


if __name__ == "__main__":
    sections = {
        "moves": moves,
        "bit_exact": bit_exact,
        "moments": moments,
        "short": short,
        "twice": twice,
        "cards": cards,
        "cards_moments": cards_moments,
    }
    sys.exit(run("memory", sections, __doc__ or "", apart=list(sections)))
