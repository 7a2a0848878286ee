"""qgpud on the kmod plane over the simulated driver, whose own total stands in for NVML's size of the card.

The module learns that size from the first pod, too late for a grant of memory to the first.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "vm" / "guest"))

import qg
import simcard

from qgpu.daemon import kmod_plane, main
from qgpu.planes.kmod.host import KmodHost


def open_host() -> KmodHost:
    """Open the module on the simulated driver, with the size of its cards."""
    host = simcard.open_host()
    sized = [dataclasses.replace(pgpu, memory=qg.sim()["total"]) for pgpu in host.pgpus()]
    host.pgpus = lambda: sized  # type: ignore[method-assign]
    return host


if __name__ == "__main__":
    kmod_plane.open_host = open_host
    main.main()
