"""More memory than a card has: an online pod that starts on a full card, and two jobs that take turns."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from statistics import median as median_of

from figures import Figure, at_least, at_most, median
from harness import QGPUD, Bench
from memory_pods import GIB, TIMEOUT_S, driver, free
from pods import BenchError, Pod, stop_all, tail, wait_for
from script import NotHereError, Script, listed

#: Offline pods that fill the card, and the online pod that has no room beside them: what each holds, in GiB. A limit
#: leaves a GiB for the context.
OFFLINE_GIB, ONLINE_GIB = 22, 19
#: Each of two jobs may have this part of the card, and has so many GiB.
JOB_PART, JOB_GIB = 0.6, 1
TURN_S, CYCLES = 20, 2
#: A job without kernels for this many seconds is off the card.
OFF_S = 1.0
_SHORT_TURNS = "from qgpu.policies import memory_turns; memory_turns.TURN_NS = {ns}; "


def short(script: Script) -> list[Figure]:
    """Start an online pod on a card full of offline memory, and on one with room."""
    bench = script.bench
    if bench.simulated:
        raise NotHereError("starts and moves take their time on a card only")
    size, times = f"{OFFLINE_GIB}GiB", max(1, round(2 * script.scale))
    with bench.daemon():
        bench.ctl("gpu", "policy", "set", "0", "--memory-overcommit", "2.0")
        with_room = [_online_start_s(bench) for _ in range(times + 1)]
        plain = bench.outside("plain", "100us", "--memory", size, "--period", "10ms")
        script.running_outside(plain)
        drivers = [driver(plain.load_process().pid)[0] for _ in range(times)]
        plain.end()
        card = bench.ask("gpu.list")["gpus"][0]["memory"]
        limit = f"{OFFLINE_GIB + 1}GiB"
        pods = [
            bench.pod(f"offline-{number}", "1ms", "--memory", size, memory=limit)
            for number in range(int(card // ((OFFLINE_GIB + 1) * GIB)))
        ]
        script.running(*pods)
        script.say(f"{len(pods)} offline pods; {free(bench) / GIB:.1f} GiB free")
        took = []
        for _ in range(times):
            took.append(_online_start_s(bench))
            wait_for("the offline pods to come back", lambda: _all_run(bench), TIMEOUT_S)
        lost = sum(pod.process.poll() is not None for pod in pods)
    script.say(f"start with room {listed(with_room)} s, without {listed(took)} s; driver off {listed(drivers)} s")
    waited = [each - median_of(with_room) for each in took]
    note = f"an online pod of {ONLINE_GIB} GiB, beside offline pods of {OFFLINE_GIB} GiB each"
    return [
        median("online_start_with_room_s", with_room, note="the same on an empty card; to the first kernel's end"),
        median("online_start_short_of_memory_s", took, note=f"{note}, that fill the card; to the first kernel's end"),
        median(
            "online_wait_over_driver",
            [each / median_of(drivers) for each in waited],
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
    wait_for("the online pod to run", lambda: _has_run(bench, pod), TIMEOUT_S)
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
