"""A program that no pod has: exits with 0 when the simulated card runs its kernels: no gate is closed."""

from __future__ import annotations

import sys
import time

import nv
import qg

KERNELS = 20
_PATIENCE_S = 30


def main() -> None:
    if shut := [tsg for tsg in qg.sim_tsgs() if tsg["off"]]:
        sys.exit(f"{len(shut)} TSGs are off")
    program = nv.Program()
    _, (channel,) = program.compute()
    program.submit(channel, 1000)
    end = time.monotonic() + _PATIENCE_S
    while int(program.query(channel)["kernels"]) < KERNELS:  # type: ignore[call-overload]
        if time.monotonic() > end:
            sys.exit("the card runs nothing")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
