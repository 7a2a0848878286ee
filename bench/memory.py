"""Suspend and resume pods: the time beside that of the driver's own calls, and that nothing is lost.

    python bench/memory.py                       # as root, on a GPU; the section bit_exact needs torch; ten minutes
    python bench/memory.py --only moves          # one section
    python bench/memory.py --plane sim           # a rehearsal on a simulated pGPU

``moves``: a plain process and one in a pod, of one size, in turn: the driver's calls made by a helper outside of qgpu,
and ``pod.suspend`` and ``pod.resume``, each from the request to the end. Both start a process that loads libcuda.
``speed``: where that time goes, with huge pages, and with several pods at once.
``bit_exact``: programs that are suspended while they run must give the same bits as undisturbed, or be refused.
``moments``: daemon, guardian and helpers are killed while pods move; then every pod must run or be suspended, and all
must run in the end. Two of the pods take all the memory that they get.
``short``: an online pod of 20 GiB starts on a card full of offline memory, and on one with room.
``twice``: two jobs that do not fit together take turns, the least turn shortened to 20 s: their work beside that of one
job alone.
``cards``: on a host with two cards of one model, a pod moves between them beside the driver's own move of a plain
process, programs move while they run, and a card is drained; ``two_cards``: pods that have both are suspended;
``cards_moments``: kills while pods move.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from figures import Figure, at_least, at_most, median
from memory_bits import ONE_CARD, same_bits, there_and_back
from memory_cards import cards, cards_moments, two_cards
from memory_pods import MIB, ROOM_GIB, driver, free, kills, move, place
from memory_speed import speed
from memory_turns import short, twice
from script import NotHereError, Script, listed, run

SIZE_GIB = 8
REPEATS = 3
#: Short kernels with long pauses, so that the card has time for both processes.
LOAD = ("--memory", f"{SIZE_GIB}GiB", "--period", "10ms")
ROUNDS = {"daemon": 6, "guardian": 6, "helpers": 12}


def moves(script: Script) -> list[Figure]:
    """Move a pod and a plain process of one size in turn."""
    bench = script.bench
    with bench.daemon():
        before = free(bench)
        pod = bench.pod("moved", "100us", *LOAD, memory=f"{SIZE_GIB + ROOM_GIB}GiB")
        script.running(pod)
        pod_off, pod_back, left, driver_off, driver_back = [], [], [], [], []
        pod_off.append(move(bench, "moved", "suspend"))
        left.append((before - free(bench)) / MIB)  # nothing else is on the card
        pod_back.append(move(bench, "moved", "resume"))
        plain = None if bench.simulated else bench.outside("plain", "100us", *LOAD)
        if plain is not None:
            script.running_outside(plain)
        for _ in range(REPEATS):
            if plain is not None:
                off, back = driver(plain.load_process().pid)
                driver_off.append(off)
                driver_back.append(back)
            pod_off.append(move(bench, "moved", "suspend"))
            pod_back.append(move(bench, "moved", "resume"))
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


def bit_exact(script: Script) -> list[Figure]:
    """Compare programs that are suspended while they run to undisturbed ones."""
    if script.bench.simulated or importlib.util.find_spec("torch") is None:
        raise NotHereError("torch on a GPU is needed")
    with script.bench.daemon():
        return [same_bits(script, "bit_exact", there_and_back(script.bench), "suspended", ONE_CARD)]


def moments(script: Script) -> list[Figure]:
    """Kill daemon, guardian and helpers while pods move; count what is lost."""
    bench = script.bench
    if bench.simulated:
        raise NotHereError(
            "a simulated card ends with its daemon; tests/checkpoint/test_kills.py kills on fake processes"
        )

    def begin(name: str) -> None:
        how = "suspend" if place(bench, name)["state"] == "running" else "resume"
        bench.ask(f"pod.{how}", name=name, **({"work_ns": 10**9} if how == "suspend" else {}))

    return kills(script, ROUNDS, begin, at_least(60))


if __name__ == "__main__":
    sections = {
        "moves": moves,
        "speed": speed,
        "bit_exact": bit_exact,
        "moments": moments,
        "short": short,
        "twice": twice,
        "cards": cards,
        "two_cards": two_cards,
        "cards_moments": cards_moments,
    }
    sys.exit(run("memory", sections, __doc__ or "", apart=list(sections)))
