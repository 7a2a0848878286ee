"""qgpud on the kmod plane over the simulated driver: that card's own count stands in for context switches and NVML."""

from __future__ import annotations

from qgpu.daemon import kmod_plane
from qgpu.daemon.main import main
from qgpu.sched.kmod import KmodHost
from tests.contract.kmod_rig import describe, meter

if __name__ == "__main__":
    kmod_plane.open_host = lambda: KmodHost(meter, describe)
    main()
