"""Whoever decides may die, hang or be replaced at any moment: within its lease every pod runs at default slices.

In virtual time, so that moments can be many: ``QGPU_MOMENTS=200`` (48 by default). The planes with a kernel or a
guardian in them are tried by ``bench/isolation.py --only safe`` where they are.
"""

from __future__ import annotations

import os
from random import Random

import pytest

from qgpu.load.workload import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, Grant, PodClass
from qgpu.planes.sim.host import SimHost
from qgpu.policies import registry
from qgpu.sched import loop
from qgpu.sched.ledger import Ledger

MOMENTS = int(os.environ.get("QGPU_MOMENTS", "48"))
#: Opening a gate takes the simulated card as long as the real one, one after the other.
CALLS_NS = 20 * NS_PER_MS


class World:
    """A simulated card with pods under load, and a daemon's loop that can be left off anywhere."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.host = SimHost()
        self.gpu = self.host._card(0).gpu
        self.lease_ns = self.gpu.hardware.lease_ns
        for number in range(random.randint(1, 5)):
            name, online = f"pod-{number}", random.random() < 0.25
            self.host.admit(name, {0: Grant(PodClass.ONLINE if online else PodClass.OFFLINE, 12, None)})
            kernel_us = random.choice([50, 1000, 100_000])
            self.host.start_load(name, 0, Workload(100, batch=1, period_us=10_000) if online else Workload(kernel_us))
        self.start_daemon()

    def start_daemon(self) -> None:
        self.backend = self.host.backend(0)
        self.ledger = Ledger(0)
        name = self.random.choice(sorted(registry.POLICIES))
        period_ns = self.random.choice([10, 100, 1000]) * NS_PER_MS
        self.settings = loop.Settings(registry.compose(name, "best-effort"), period_ns)

    def run(self, duration_ns: int) -> None:
        """Let the daemon work; the last round may be over in the middle of a period."""
        end_ns = self.gpu.now_ns + duration_ns
        while self.gpu.now_ns < end_ns:
            self.ledger = loop.tick(self.backend, self.settings, self.ledger)

    def planned(self) -> bool:
        return self.host._card(0).gates._timeline is not None

    def is_default(self) -> bool:
        slices = {tsg.timeslice_us for pod in self.gpu.pods.values() for tsg in pod.tsgs}
        return slices == {self.gpu.hardware.default_timeslice_us} and all(pod.open for pod in self.gpu.pods.values())


@pytest.mark.parametrize("seed", range(8))
def test_daemon_loss_restores_default_slices_within_lease(seed):
    world = World(Random(seed))
    for _ in range(MOMENTS // 8):
        world.run(world.random.randrange(3 * NS_PER_S))
        world.gpu.advance(world.gpu.now_ns + world.random.randrange(200 * NS_PER_MS))
        how = world.random.choice(["killed", "stopped", "ended"])
        if how == "ended":
            world.backend.close()
        world.gpu.advance(world.gpu.now_ns + (CALLS_NS if how == "ended" else world.lease_ns + CALLS_NS))

        assert world.is_default(), how
        if how == "stopped":  # it goes on where it was, with what it knew
            world.run(NS_PER_S)
        else:
            world.start_daemon()
            world.run(NS_PER_S)
        assert world.planned()


def test_nothing_is_left_of_daemons_that_went():
    world = World(Random(0))
    world.run(NS_PER_S)
    before = len(world.gpu._events)
    for _ in range(50):
        world.start_daemon()
        world.run(NS_PER_S)
    world.gpu.advance(world.gpu.now_ns + 2 * world.lease_ns)

    assert len(world.gpu._events) <= before + len(world.gpu.pods)
