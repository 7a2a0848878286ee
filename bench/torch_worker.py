"""A process that runs torch programs, one at a time, as directed by a file beside RESULT; see ``torch_programs``.

    python bench/torch_worker.py --programs resnet-eager-16,copy-h2d --json RESULT

It prints ``ready`` when each program has run once, rests until it is asked for one (``ask``) and ends on SIGTERM. When
it is asked for another program or to rest, it adds a line to RESULT with suffix ``CHUNKS``: the end and length of every
step, ``{"program": NAME, "steps": [[end_ns, took_ns], ...]}``, in ns since the epoch. At its end it writes RESULT,
``{"steps": {PROGRAM: [[end_ns, took_ns], ...]}}``. For a service a step is a request, and its length counts from when
it was due.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from qgpu.model import NS_PER_MS, NS_PER_S

_POLL_NS = 5 * NS_PER_MS
_SUFFIX = ".program"
CHUNKS = ".chunks"
REST = "rest"


def ask(result: Path, program: str) -> None:
    """Ask the process that writes ``result`` for another program."""
    fresh = result.with_suffix(".new")
    fresh.write_text(program)
    fresh.replace(result.with_suffix(_SUFFIX))


def main() -> None:
    """Run until told to stop."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--programs", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--cpus", help="the only CPUs it may use, by comma")
    options = parser.parse_args()
    if options.cpus:
        os.sched_setaffinity(0, map(int, options.cpus.split(",")))
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    from torch_programs import PERIOD_MS, PROGRAMS

    steps = {}
    for name in options.programs.split(","):
        steps[name] = PROGRAMS[name]()
        for _ in range(3):
            steps[name]()
    print("ready", flush=True)
    done: dict[str, list[tuple[int, int]]] = {name: [] for name in steps}
    told = dict.fromkeys(steps, 0)
    asked, looked_ns, due_ns = REST, 0, 0
    while not stopping:
        now_ns = time.time_ns()
        if now_ns - looked_ns >= _POLL_NS:
            looked_ns, before = now_ns, asked
            with suppress(FileNotFoundError):
                asked = options.json.with_suffix(_SUFFIX).read_text()
            if asked != before:
                if before != REST:
                    _tell(options.json, before, done[before][told[before] :])
                    told[before] = len(done[before])
                due_ns = now_ns = time.time_ns()
        if asked == REST:
            time.sleep(0.002)
            continue
        began_ns = now_ns
        if asked in PERIOD_MS:
            if now_ns < due_ns:
                time.sleep(min(due_ns - now_ns, _POLL_NS) / NS_PER_S)
                continue
            began_ns, due_ns = due_ns, due_ns + PERIOD_MS[asked] * NS_PER_MS
        steps[asked]()
        ended_ns = time.time_ns()
        done[asked].append((ended_ns, ended_ns - began_ns))
    options.json.write_text(json.dumps({"steps": done}))


def _tell(result: Path, program: str, steps: list[tuple[int, int]]) -> None:
    """Add the steps of a program to the file beside ``result``."""
    with result.with_suffix(CHUNKS).open("a") as file:
        file.write(json.dumps({"program": program, "steps": steps}) + "\n")


if __name__ == "__main__":
    main()
