"""The simulator under the contract suite, in virtual time: a card, or one MIG instance of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qgpu.load.workload import Workload
from qgpu.planes.sim.hardware import H200
from qgpu.planes.sim.host import SimHost


class SimRig:
    """One simulated pGPU: a card, or with ``mig`` the last of so many instances."""

    lease_ns = H200.lease_ns
    tries = 1

    def __init__(self, mig: int = 0) -> None:
        self.host = SimHost(mig=mig)
        self.pgpu = self.host.pgpus()[-1].index
        self._latencies: dict[int, list[float]] = {}

    def start(self, pod: str, workload: Workload) -> int:
        """Start a load."""
        return self.host.start_load(pod, self.pgpu, workload)

    def container(self) -> str:
        """Return a path: the simulator looks at no cgroup."""
        return "/container"

    def kill(self, load: int) -> None:
        """End it."""
        self.host.stop_load(load)

    def kernels(self, load: int) -> int:
        """Count its kernels."""
        progress = self.host.progress(load)
        self._latencies.setdefault(load, []).extend(progress.latencies_us)
        return progress.kernels

    def latencies_us(self, load: int) -> list[float]:
        """Return its latencies."""
        self.kernels(load)
        return self._latencies.pop(load)

    def pass_time(self, duration_ns: int) -> None:
        """Jump."""
        clock = self.host.backend(self.pgpu)
        end_ns = clock.sample().now_ns + duration_ns
        while (now_ns := clock.sample().now_ns) < end_ns:
            clock.wait(end_ns - now_ns)

    def restart(self) -> None:
        """Keep the host: its pods are the simulator's own, and only the backend's user is new."""


@contextmanager
def open_rig(_directory: Path) -> Iterator[SimRig]:
    """Give a simulator of its own to a test."""
    rig = SimRig()
    yield rig
    rig.host.close()
