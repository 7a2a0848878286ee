"""MIG instances of a simulated card: pGPUs of their own, each with its part of the memory."""

from __future__ import annotations

import pytest

from qgpu.errors import RefusedError, UnknownNameError
from qgpu.load.workload import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, Grant
from qgpu.model.plane_api import MigInstance
from qgpu.planes.sim.hardware import H200
from qgpu.planes.sim.host import SimHost
from qgpu.policies.registry import compose
from qgpu.sched import loop
from qgpu.sched.ledger import Ledger
from qgpu.units import GIB

FLOOD = Workload(kernel_us=1000.0, batch=0)
HOW = loop.Settings(compose("burst-share", "best-effort"), 100 * NS_PER_MS)


def shares(host: SimHost, pgpu: int) -> dict[str, float]:
    """Run the loop on an instance for three seconds, and return each pod's share of its time in the last two."""
    backend = host.backend(pgpu)
    before = ledger = loop.tick(backend, HOW, Ledger(pgpu))
    for seconds in (1, 3):
        before = ledger
        while (ledger.now_ns or 0) < seconds * NS_PER_S:
            ledger = loop.tick(backend, HOW, ledger)
    total = {name: account.used_ns - before.accounts[name].used_ns for name, account in ledger.accounts.items()}
    return {name: run_ns / sum(total.values()) for name, run_ns in total.items()}


def test_instances_are_numbered_beside_cards_and_divide_memory() -> None:
    found = SimHost(gpus=2, mig=2).pgpus()

    assert [pgpu.index for pgpu in found] == [101, 102, 201, 202]
    assert [pgpu.mig for pgpu in found[:2]] == [MigInstance(0, 1), MigInstance(0, 2)]
    assert {pgpu.memory for pgpu in found} == {H200.memory // 2}
    assert len({pgpu.uuid for pgpu in found if pgpu.uuid.startswith("MIG-")}) == 4


def test_shares_hold_within_each_instance() -> None:
    host = SimHost(mig=2)
    for pgpu, quotas in ((101, {"a": 60, "b": 30}), (102, {"c": 20, "d": 60, "e": 20})):
        for name, cores in quotas.items():
            host.admit(name, {pgpu: Grant(cores=cores)})
            host.start_load(name, pgpu, FLOOD)

    assert shares(host, 101) == pytest.approx({"a": 2 / 3, "b": 1 / 3}, abs=0.02)
    assert shares(host, 102) == pytest.approx({"c": 0.2, "d": 0.6, "e": 0.2}, abs=0.02)


def test_pods_of_one_instance_take_nothing_from_another() -> None:
    host = SimHost(mig=2)
    for name, pgpu in (("a", 101), ("b", 101), ("alone", 102)):
        host.admit(name, {pgpu: Grant()})
        host.start_load(name, pgpu, FLOOD)

    assert shares(host, 102) == {"alone": 1.0}
    assert host.times(102).idle_ns < 0.1 * NS_PER_S


def test_memory_is_that_of_the_instance() -> None:
    host = SimHost(mig=2)
    host.admit("a", {101: Grant(memory=60 * GIB)})
    host.admit("b", {102: Grant()})
    host.start_load("a", 101, Workload(kernel_us=1000.0, batch=0, memory=40 * GIB))

    with pytest.raises(RefusedError, match="memory limit"):
        host.start_load("a", 101, Workload(kernel_us=1000.0, batch=0, memory=21 * GIB))
    host.start_load("b", 102, Workload(kernel_us=1000.0, batch=0, memory=70 * GIB))
    with pytest.raises(RefusedError, match="pGPU 102 is out of memory"):
        host.start_load("b", 102, Workload(kernel_us=1000.0, batch=0, memory=GIB))


def test_card_that_is_divided_is_no_pgpu_itself() -> None:
    with pytest.raises(UnknownNameError, match="pGPU 0: there is none of that number; there are: 101, 102"):
        SimHost(mig=2).admit("a", {0: Grant()})
