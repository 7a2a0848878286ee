"""A pod's program for the lane: keeps the simulated card busy and writes down when its kernels are done.

pod.py FILE: until SIGTERM, then FILE has lines of "time in ns, kernels so far", one whenever the count was seen to
have grown. It looks every 10 ms with real-time priority, so that what it sees is the card and not the
emulator's CPUs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import nv

KERNEL_US = 1000
_LOOK_S = 0.01


def main() -> None:
    program = nv.Program()
    _, (channel,) = program.compute()
    program.submit(channel, KERNEL_US)
    with contextlib.suppress(PermissionError):  # in a container
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    over: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: over.append(1))
    last = -1
    with Path(sys.argv[1]).open("w", buffering=1) as file:
        while not over:
            kernels = int(program.query(channel)["kernels"])  # type: ignore[call-overload]
            if kernels != last:
                file.write(f"{time.monotonic_ns()} {kernels}\n")
                last = kernels
            time.sleep(_LOOK_S)


if __name__ == "__main__":
    main()
