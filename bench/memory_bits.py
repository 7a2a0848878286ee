"""Disturb programs while they run: they must give the same bits as undisturbed, or be refused."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from figures import Figure
from harness import ROOT, Bench
from memory_pods import TIMEOUT_S, move
from pods import BenchError, Pod
from script import Script

from qgpu.errors import QgpuError, RefusedError

#: How often each program is disturbed.
TIMES = 3


@dataclass(frozen=True)
class Program:
    """How many steps a program makes, on which cards; ``refused``: it must be left alone, with a reason."""

    steps: int
    gpus: tuple[int, ...] = (0,)
    refused: bool = False


ONE_CARD = {
    "training": Program(800),
    "decoder": Program(5000),
    "two": Program(500),
    "ipc": Program(2000, refused=True),
}
TWO_CARDS = {"cards": Program(12000, (0, 1)), "peers": Program(1500, (0, 1), refused=True)}


def there_and_back(bench: Bench) -> Callable[[str, int], None]:
    """Return what suspends a pod and resumes it."""

    def disturb(name: str, _turn: int) -> None:
        move(bench, name, "suspend")
        move(bench, name, "resume")

    return disturb


def same_bits(
    script: Script,
    figure: str,
    disturb: Callable[[str, int], None],
    how: str,
    programs: Mapping[str, Program],
) -> Figure:
    """Run all programs undisturbed, and again while ``disturb`` gets their pods' names and turns from 0; compare."""
    wanted = _results(script, "calm", programs, lambda _: None)
    times, refused = dict.fromkeys(programs, 0), dict.fromkeys(programs, 0)

    def disturb_one(name: str, pod: Pod) -> None:
        for turn in range(TIMES):
            try:
                _wait_step(pod, programs[name].steps * (turn + 1) // (TIMES + 2))
                disturb(pod.name, turn)
                times[name] += 1
            except RefusedError as error:
                refused[name] += 1
                if refused[name] == 1:
                    script.say(f"{name}: {error}")
            except (BenchError, QgpuError) as error:
                script.say(f"{name}, {how} {times[name]} times: {error}")
                return

    def disturb_all(pods: dict[str, Pod]) -> None:
        threads = [threading.Thread(target=disturb_one, args=each) for each in pods.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    got = _results(script, how, programs, disturb_all)
    as_asked = {name: refused[name] if each.refused else times[name] for name, each in programs.items()}
    same = [name for name in programs if got[name] == wanted[name] and as_asked[name] == TIMES]
    script.say(f"{how} {times} times, refused {refused} times; as asked: {', '.join(same) or 'none'}")
    left_alone = [name for name, each in programs.items() if each.refused]
    note = (
        f"of {', '.join(programs)}: the part that gave the same bits; each {how} {TIMES} times, but "
        f"{', '.join(left_alone)} refused"
    )
    return Figure(figure, len(same) / len(programs), (), "= 1", len(same) == len(programs), note)


def _results(
    script: Script, name: str, programs: Mapping[str, Program], disturb: Callable[[dict[str, Pod]], None]
) -> dict[str, list[str]]:
    """Run all programs at once, each in a pod, and return what each found."""
    pods = {
        program: script.bench.start_pod(
            f"{name}-{program}",
            [sys.executable, str(ROOT / "bench" / "memory_programs.py"), program, "--steps", str(each.steps)],
            gpus=each.gpus,
        )
        for program, each in programs.items()
    }
    for pod in pods.values():
        _wait_step(pod, 0)
    disturb(pods)
    results = {}
    for program, pod in pods.items():
        if pod.process.wait(TIMEOUT_S):
            raise BenchError(f"{program}: {pod.log.read_text()[-300:]}")
        results[program] = json.loads(pod.file.read_text())["result"]
    return results


def _wait_step(pod: Pod, step: int) -> None:
    pod.wait_log(f"step {step}\n", TIMEOUT_S)
