"""The loop's thread: it outlives a plane that fails, and its end leaves every gate open."""

from __future__ import annotations

import threading

from qgpu.config import GpuSettings
from qgpu.daemon.gpu_loop import GpuLoop
from qgpu.errors import BackendGoneError
from qgpu.model import Grant
from qgpu.planes.sim.host import SimBackend, SimHost
from tests.contract.rig import FLOOD


class Flaky(SimHost):
    """A simulated host whose first backends cannot be opened, like a guardian that is being replaced."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.opened = threading.Event()

    def backend(self, pgpu: int) -> SimBackend:
        """Open a backend once there were enough failures."""
        if self.failures:
            self.failures -= 1
            raise BackendGoneError("guardian: it has died")
        self.opened.set()
        return super().backend(pgpu)


def test_a_backend_that_fails_is_opened_again() -> None:
    host = Flaky(failures=1)
    running = GpuLoop(host, 0, GpuSettings())

    assert host.opened.wait(30)
    assert running.alive
    running.stop()
    assert not running.alive


def test_the_end_of_the_loop_opens_every_gate() -> None:
    host = SimHost()
    host.admit("shut", {0: Grant(cores=1)})
    load = host.start_load("shut", 0, FLOOD)
    planned = threading.Event()
    running = GpuLoop(host, 0, GpuSettings("fixed-share"))
    while running.ledger.now_ns is None or running.ledger.now_ns < 2 * 10**9:  # virtual time: at once
        planned.wait(0.001)
    running.stop()
    before = host.progress(load).kernels
    clock = host.backend(0)
    clock.sample()
    clock.wait(10**9)

    assert host.progress(load).kernels - before > 900
