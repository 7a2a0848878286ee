"""Move pods between two cards of one host: the time beside the driver's own move, the results, and kills meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from figures import Figure, at_least, at_most, median
from harness import QGPUD, Bench
from memory_bits import ONE_CARD, TWO_CARDS, same_bits, there_and_back
from memory_pods import MIB, ROOM_GIB, SMALL, driver, free, kills, place, settled
from pods import BenchError
from script import NotHereError, Script, listed

from qgpu.errors import QgpuError

#: A move between cards takes as long as both ways of a suspension.
ROUNDS = {"daemon": 3, "guardian": 3, "helpers": 4}
#: The memory of a moving pod, in GiB.
HELD_GIB = 16


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
    settled(bench, name)
    took, found = time.monotonic() - began, place(bench, name)
    on = [grant["gpu"] for grant in found["grants"]]
    if found["state"] != "running" or on != [gpu]:
        raise BenchError(f"pod {name}: it is {found['state']} on pGPU {on}, not on {gpu}: {found['state_error']}")
    return took


def cards(script: Script) -> list[Figure]:
    """Move a pod and a plain process between two cards in turn, then programs while they run; drain a card."""
    _need_two_cards(script)
    bench = script.bench
    holds = ("--memory", f"{HELD_GIB}GiB", "--period", "10ms")
    took, drivers, left, charged = [], [], [], []
    with bench.daemon():
        uuids = [card["uuid"] for card in bench.ask("gpu.list")["gpus"]]
        exchange = {**{uuid: uuid for uuid in uuids}, uuids[0]: uuids[1], uuids[1]: uuids[0]}
        before = free(bench)
        pod = bench.pod("moved", "100us", *holds, memory=f"{HELD_GIB + ROOM_GIB}GiB")
        script.running(pod)
        took.append(_to(bench, "moved", 1))
        left.append((before - free(bench)) / MIB)  # nothing else is on that card
        bench.wait_busy(pod)
        plain = None if bench.simulated else bench.outside("plain", "100us", *holds)
        if plain is not None:
            script.running_outside(plain)
        for turn in range(max(1, round(2 * script.scale))):
            if plain is not None:
                try:
                    drivers.append(sum(driver(plain.load_process().pid, exchange)))
                except QgpuError as error:
                    script.say(f"the driver's own move: {error}")
            took.append(_to(bench, "moved", turn % 2))
            bench.wait_busy(pod)
            charged.append(bench.ask("gpu.list")["gpus"][1 - turn % 2]["memory_used"] / MIB)
        script.say(f"moves {listed(took)} s, the driver's own {listed(drivers)} s; left {listed(left)} MiB")
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
        same = []
        if not bench.simulated:
            same.append(same_bits(script, "move_bit_exact", _to_other(bench), "moved", ONE_CARD))
    what = f"a process with {HELD_GIB} GiB"
    note = f"{what}, between two cards of one model"
    figures = [
        median("move_s", took, note=f"{note}, in a pod, which goes on there"),
        median("moved_left_mib", left, note=f"of the card's memory that {what} left"),
        median("moved_charged_mib", charged, *at_most(0), note="what pods are charged on the card that it left"),
        median("drain_s", [drained], note=f"gpu drain: {len(small)} pods with 512 MiB each move, and go on"),
    ]
    if drivers:
        figures.append(median("driver_move_s", drivers, note=f"{note}, no pod"))
    return figures + same


def two_cards(script: Script) -> list[Figure]:
    """Suspend pods that have two cards: one that uses each by itself, and one that copies between them."""
    if script.bench.simulated:
        raise NotHereError("torch on two GPUs is needed")
    _need_two_cards(script)
    with script.bench.daemon():
        return [same_bits(script, "two_cards_bit_exact", there_and_back(script.bench), "suspended", TWO_CARDS)]


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
        found = place(bench, name)
        on = {grant["gpu"] for grant in found["grants"]}
        if found["state"] == "suspended":
            bench.ask("pod.resume", name=name)
        elif len(on) == 1:
            bench.ask("pod.move", **{"name": name, "gpu": 1 - min(on), "from": None})

    few = sum(ROUNDS.values())
    return [replace(each, name=f"cards_{each.name}") for each in kills(script, ROUNDS, begin, at_least(few))]
