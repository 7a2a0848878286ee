"""Fuzz for long: ``python -m tests.fuzz [--count 10000000] [--only decode,wire] [--seed N] [--out FILE]``.

Inputs are shared out among the targets by what they cost. A defect ends the run with its seed, from which it comes
again: each input has its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import structlog

from tests.fuzz.targets import TARGETS

#: Of every hundred inputs.
_SHARES = {"decode": 80, "register": 10, "judge": 2, "wire": 7, "requests": 1}


def fuzz(name: str, make: Callable[[Random], Callable[[], None]], count: int, seed: int) -> dict[str, float]:
    """Try ``count`` inputs of one target and say how long it took. Raises what a defect raises."""
    random = Random(seed)
    attempt = make(random)
    started = time.monotonic()
    for number in range(count):
        try:
            attempt()
        except BaseException:
            print(f"{name}: seed {seed}, input {number}", file=sys.stderr)
            raise
    return {"inputs": count, "seconds": round(time.monotonic() - started, 1)}


def main() -> int:
    """Run the targets one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000_000)
    parser.add_argument("--only", default=",".join(TARGETS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = options.only.split(",")
    whole = sum(_SHARES[name] for name in names)
    found = {}
    structlog.configure(processors=[], logger_factory=structlog.ReturnLoggerFactory())
    for name in names:
        found[name] = fuzz(name, TARGETS[name], options.count * _SHARES[name] // whole, options.seed)
        print(f"{name}: {found[name]['inputs']} inputs in {found[name]['seconds']} s, nothing found", flush=True)
    if options.out:
        command = f"python -m tests.fuzz --only {options.only} --count {options.count} --seed {options.seed}"
        about = {"date": time.strftime("%Y-%m-%d"), "seed": options.seed, "command": command}
        options.out.write_text(json.dumps(about | {"targets": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
