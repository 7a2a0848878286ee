"""Run one torch program as a job or a service, and write down every step when it ends; see ``day_on_card``.

    python bench/day_program.py training-medium --steps 800 --json FILE

FILE gets a line for each step, "END_NS TOOK_NS", in ns, END_NS since the epoch. A service's step is a request. Its
requests begin when it starts, and each is timed from the moment when it was due. Without ``--steps`` it runs until it
is killed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from torch_programs import PERIOD_MS, PROGRAMS

from qgpu.model import NS_PER_MS, NS_PER_S


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    step = PROGRAMS[options.program]()
    period_ns = PERIOD_MS.get(options.program, 0) * NS_PER_MS
    for _ in range(3):
        step()
    done, due_ns = 0, time.time_ns()
    with options.json.open("w", buffering=1) as file:
        while options.steps is None or done < options.steps:
            began_ns = time.time_ns()
            if period_ns:
                time.sleep(max(0, due_ns - began_ns) / NS_PER_S)
                began_ns, due_ns = due_ns, due_ns + period_ns
            step()
            ended_ns = time.time_ns()
            file.write(f"{ended_ns} {ended_ns - began_ns}\n")
            done += 1


if __name__ == "__main__":
    main()
