"""The kmod plane on the simulated driver: its own count of GPU time, and names for its cards.

As a program it is qgpud on that plane, for a VM in which the real daemon would find neither context-switch records nor
NVML: ``/usr/lib/qgpu/bin/python -I simcard.py --config FILE``. Everything but these two is the daemon's own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from qgpu.model import TsgSample
from qgpu.model.plane_api import Pgpu
from qgpu.planes.kmod.backend import Reading, TsgRef
from qgpu.planes.kmod.device import Card
from qgpu.planes.kmod.host import KmodHost

sys.path.insert(0, str(Path(__file__).parent))

import qg


class SimMeter:
    """The simulated card's own count, in place of context switches."""

    detailed = False
    lost = 0

    def __init__(self) -> None:
        #: What each TSG had done by the last reading: time on the engine, and how often it was switched in. None before
        #: the first one: what TSGs did for the daemon before this one is none of its time.
        self._seen: dict[int, tuple[int, int]] | None = None

    def read(self, tsgs: Sequence[TsgRef]) -> Reading:
        """Return what each TSG did since the last call; of two with the same handle the first lives."""
        tsgs = list({(ref.client, ref.handle): ref for ref in reversed(tsgs)}.values())
        rows = {(row["client"], row["handle"]): row for row in qg.sim_tsgs()}
        there = {ref: row for ref in tsgs if (row := rows.get((ref.client, ref.handle)))}
        seen, self._seen = self._seen, {ref.ident: (row["run_ns"], row["starts"]) for ref, row in there.items()}
        samples = {}
        for ref, row in there.items():
            run_ns, starts = (row["run_ns"], row["starts"]) if seen is None else seen.get(ref.ident, (0, 0))
            resident = bool(row["resident"])
            samples[ref.ident] = TsgSample(ref.name, row["run_ns"] - run_ns, row["starts"] - starts, resident)
        return Reading(samples)

    def close(self) -> None:
        """Nothing to stop."""


def _meter(_card: Card) -> SimMeter:
    return SimMeter()


def _uuid(index: int) -> str:
    return f"GPU-51300000-0000-0000-0000-{index:012d}"  # Kubernetes allocates no card without a UUID


def _describe(cards: Sequence[Card]) -> list[Pgpu]:
    # The module knows a card's memory only once a pod has opened it.
    return [Pgpu(i, _uuid(i), "simulated", qg.sim()["total"], i) for i in range(len(cards))]


def open_host() -> KmodHost:
    """Open the module on the simulated driver."""
    return KmodHost(_meter, _describe)


if __name__ == "__main__":
    from qgpu.daemon import kmod_plane, main

    kmod_plane.open_host = open_host
    main.main()
