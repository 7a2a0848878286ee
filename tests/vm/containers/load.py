"""What runs in the containers: a CUDA program as far as the simulated driver is concerned.

load.py             keeps card 0 busy until it is killed
load.py memory MIB  asks for that much card memory; prints RM's status, in hex, 0x0 being fine
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "guest"))

import nv

KERNEL_US = 1000


def main() -> None:
    program = nv.Program()
    if sys.argv[1:2] == ["memory"]:
        try:
            program.memory(int(sys.argv[2]) << 20)
            print("0x0")
        except nv.RmError as error:
            print(hex(error.status))
        return
    _, (channel,) = program.compute()
    program.submit(channel, KERNEL_US)
    signal.pause()


if __name__ == "__main__":
    main()
