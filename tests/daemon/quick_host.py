"""A simulated host for tests of the daemon in which moves take no time."""

from __future__ import annotations

from qgpu.planes.sim.host import Clock, SimHost


class QuickHost(SimHost):
    """Moves take no time, but loops keep to the clock: in virtual time each of them takes all of a CPU."""

    def __init__(self, gpus: int = 1) -> None:
        super().__init__(gpus, Clock.REAL)

    def pass_time(self, duration_ns: int) -> None:
        """Do nothing."""
