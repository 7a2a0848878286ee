"""Pods on several simulated pGPUs: the real loops and policies give them the same turns at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import pytest

from qgpu.daemon.gang_exchange import GangExchange
from qgpu.load.workload import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, NS_PER_US, Grant
from qgpu.planes.sim.host import SimHost
from qgpu.policies.registry import POLICIES, compose
from qgpu.sched import loop
from qgpu.sched.ledger import Ledger

FLOOD = Workload(kernel_us=1000, batch=0)
BATCHES = Workload(kernel_us=2000, batch=1, gap_us=50)
SETTLE_NS, MEASURE_NS = 2 * NS_PER_S, 4 * NS_PER_S
STEP_NS = 250 * NS_PER_US


class Rack:
    """Several simulated pGPUs under one policy, a loop for each; time goes on together."""

    def __init__(self, gpus: int, policy: str = "burst-share", coordinated: bool = True) -> None:
        self.host = SimHost(gpus)
        self._backends = [self.host.backend(index) for index in range(gpus)]
        self._ledgers = [Ledger(index) for index in range(gpus)]
        board = GangExchange()
        boards = [board if coordinated else GangExchange() for _ in range(gpus)]
        self._policies = [each.in_step(compose(policy, "best-effort"), POLICIES[policy].plan) for each in boards]
        #: For each probe: the pods that had the engine, by pGPU.
        self.seen: list[dict[int, str]] = []

    def add(self, name: str, cores: int, *loads: tuple[int, Workload]) -> None:
        """Let a pod come with a process on each of these pGPUs."""
        self.host.admit(name, {gpu: Grant(cores=cores) for gpu, _ in loads})
        for gpu, workload in loads:
            self.host.start_load(name, gpu, workload)

    def run(self, until_ns: int) -> None:
        """Let time pass."""
        while (at := min(range(len(self._backends)), key=lambda i: self._backends[i].now_ns)) is not None:
            if self._backends[at].now_ns >= until_ns:
                return
            settings = loop.Settings(self._policies[at], 100 * NS_PER_MS)
            self._ledgers[at] = loop.tick(self._backends[at], settings, self._ledgers[at])

    def watch(self, from_ns: int, until_ns: int) -> None:
        """Note who has the engine of each pGPU, every quarter of a millisecond."""
        self.seen = [{} for _ in range((until_ns - from_ns) // STEP_NS)]
        for gpu in range(len(self._backends)):
            for number in range(len(self.seen)):
                self.host.call_at(gpu, from_ns + number * STEP_NS, partial(self._look, gpu, number))

    def _look(self, gpu: int, number: int) -> None:
        resident = self.host._card(gpu).gpu.engine.resident
        self.seen[number][gpu] = resident.name.partition("/")[0] if resident else ""

    def overlap(self, name: str, gpus: Sequence[int]) -> float:
        """Return the part of a pod's time on any of these pGPUs in which it was on all of them."""
        on = [[moment[gpu] == name for gpu in gpus] for moment in self.seen]
        return sum(all(each) for each in on) / sum(any(each) for each in on)

    def shares(self, gpu: int) -> Mapping[str, float]:
        """Return who had which part of a pGPU's time."""
        names = [moment[gpu] for moment in self.seen]
        return {name: names.count(name) / len(names) for name in set(names)}

    def measure(self) -> None:
        """Let things settle, then watch."""
        self.run(SETTLE_NS)
        self.watch(SETTLE_NS, SETTLE_NS + MEASURE_NS)
        self.run(SETTLE_NS + MEASURE_NS)


def pair(policy: str = "burst-share", coordinated: bool = True) -> Rack:
    """Set up a gang of half of two pGPUs; beside it there is one flood, and a flood with a batch job."""
    rack = Rack(2, policy, coordinated)
    rack.add("flood", 50, (0, FLOOD))
    rack.add("gang", 50, (0, BATCHES), (1, BATCHES))
    rack.add("another", 30, (1, FLOOD))
    rack.add("batch", 20, (1, BATCHES))
    rack.measure()
    return rack


@pytest.mark.parametrize("policy", ["burst-share", "fixed-share"])
def test_a_gang_is_on_all_of_its_pgpus_at_once(policy: str) -> None:
    assert pair(policy).overlap("gang", (0, 1)) >= 0.98


def test_without_coordination_it_would_not_be() -> None:
    assert pair(coordinated=False).overlap("gang", (0, 1)) <= 0.6


def test_a_gang_and_those_beside_it_get_their_shares() -> None:
    rack = pair()

    for gpu, expected in ((0, {"gang": 0.5, "flood": 0.5}), (1, {"gang": 0.5, "another": 0.3, "batch": 0.2})):
        shares = rack.shares(gpu)
        for name, share in expected.items():
            assert shares[name] == pytest.approx(share, abs=0.015)


def test_gangs_that_share_a_pgpu_take_turns() -> None:
    rack = Rack(3)
    rack.add("low", 50, (0, FLOOD), (1, FLOOD))
    rack.add("high", 50, (1, FLOOD), (2, FLOOD))
    rack.add("local", 50, (2, FLOOD))
    rack.measure()

    assert rack.overlap("high", (1, 2)) >= 0.98
    # On pGPU 0 nobody else has work: no gate is moved there.
    assert rack.shares(0) == {"low": 1.0}
    assert rack.shares(1)["low"] == pytest.approx(0.5, abs=0.015)


def test_a_gang_without_rivals_has_no_gate_moved() -> None:
    rack = Rack(2)
    rack.add("gang", 50, (0, FLOOD), (1, FLOOD))
    rack.measure()

    assert rack.shares(0) == rack.shares(1) == {"gang": 1.0}
