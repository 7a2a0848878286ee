"""qgpud on the kmod plane over the simulated driver, whose own figures stand in for context switches and NVML."""

from __future__ import annotations

from collections.abc import Sequence

from qgpu.daemon import kmod_plane
from qgpu.daemon.main import main
from qgpu.sched.backend import Pgpu
from qgpu.sched.kmod import Card, KmodHost
from tests.contract.kmod_rig import meter, qg


def describe(cards: Sequence[Card]) -> list[Pgpu]:
    """Take the card's size from the driver: the module learns it from the first pod only."""
    return [Pgpu(i, card.pci, "simulated", qg.sim()["total"]) for i, card in enumerate(cards)]


if __name__ == "__main__":
    kmod_plane.open_host = lambda: KmodHost(meter, describe)
    main()
