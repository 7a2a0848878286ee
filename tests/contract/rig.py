"""What a plane brings to the contract suite: a host, a way to put loads into pods, and time that passes.

A plane joins by a module ``tests/contract/<plane>_rig.py`` with ``open_rig(directory)``, a context manager
that yields a Rig. The suite needs nothing else of it.
"""

from __future__ import annotations

from typing import Protocol

from qgpu.load.workload import Workload
from qgpu.model.plane_api import Host

#: A card full of 1 ms kernels, never waiting for the host.
FLOOD = Workload(kernel_us=1000.0, batch=0)
#: One short kernel every 10 ms, whose latency matters.
PULSE = Workload(kernel_us=100.0, batch=1, period_us=10_000.0)


class Rig(Protocol):
    """One plane under test, with a pGPU to itself."""

    host: Host
    #: The number of that pGPU.
    pgpu: int
    #: How long a plan holds without being renewed.
    lease_ns: int
    #: How often a figure is measured before a miss is a miss: once, but where the card is emulated. An emulator is held
    #: up now and then on a busy host, and gates move late; a plan that is carried out wrongly is wrong each time.
    tries: int

    def start(self, pod: str, workload: Workload) -> int:
        """Start a process of an admitted pod that puts this load on its pGPU; return its number."""

    def container(self) -> str:
        """Make a cgroup as an engine makes a container's; return its path."""

    def kill(self, load: int) -> None:
        """End a load's process without warning."""

    def kernels(self, load: int) -> int:
        """Return how many kernels a load has finished."""

    def latencies_us(self, load: int) -> list[float]:
        """Return the latencies that were measured since last asked."""

    def pass_time(self, duration_ns: int) -> None:
        """Let time pass without anybody renewing a plan."""

    def restart(self) -> None:
        """Put a new host in place of the old one, as a daemon that was killed and started again would."""
