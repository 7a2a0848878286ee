"""Counting along: sums over ticks equal what the ledger and the samples say."""

from __future__ import annotations

import pytest

from qgpu.metrics.tally import RECENT_NS, Tally
from qgpu.model import NS_PER_MS, NS_PER_S, Grant, PodClass
from qgpu.planes.sim.host import SimHost
from qgpu.policies.registry import compose
from qgpu.sched import loop
from qgpu.sched.ledger import Ledger
from tests.contract.rig import FLOOD, PULSE

SETTINGS = loop.Settings(compose("fixed-share", "best-effort"), 100 * NS_PER_MS)


def run(host: SimHost, tally: Tally, duration_ns: int) -> Ledger:
    backend, ledger = host.backend(0), Ledger(0)
    while (ledger.now_ns or 0) < duration_ns:
        ledger = loop.tick(backend, SETTINGS, ledger)
        tally.watch(ledger)
    return ledger


def test_shares_and_gated_time_are_those_of_a_fixed_share() -> None:
    host, tally = SimHost(), Tally()
    for name, cores in (("two", 40), ("one", 20)):
        host.admit(name, {0: Grant(cores=cores)})
        host.start_load(name, 0, FLOOD)
    ledger = run(host, tally, 10 * NS_PER_S)

    shares = {name: recent.share for name, recent in tally.recent().items()}
    assert shares == {"two": pytest.approx(0.4, abs=0.01), "one": pytest.approx(0.2, abs=0.01)}
    assert tally.pods["one"].gated_ns / 10 / NS_PER_S == pytest.approx(0.8, abs=0.03)
    assert tally.pods["two"].starts > 50
    assert tally.ticks > 40
    assert 0 < tally.plans < tally.ticks
    assert set(tally.pods) == set(ledger.accounts)


def test_preemptions_are_requests_that_meet_offline_work() -> None:
    host, tally = SimHost(), Tally()
    host.admit("flood", {0: Grant(cores=90)})
    host.start_load("flood", 0, FLOOD)
    host.admit("chat", {0: Grant(PodClass.ONLINE)})
    chat = host.start_load("chat", 0, PULSE)
    run(host, tally, 5 * NS_PER_S)
    requests = host.progress(chat).kernels

    # Not those that come while the gate of the flood is closed, nor after the last sample.
    assert 0.9 * requests - 12 <= tally.pods["chat"].preempting <= requests
    assert tally.pods["flood"].preempted == tally.pods["chat"].preempting
    assert (tally.pods["chat"].preempted, tally.pods["flood"].preempting) == (0, 0)


def test_a_pod_that_is_gone_is_forgotten() -> None:
    host, tally = SimHost(), Tally()
    host.admit("brief", {0: Grant()})
    run(host, tally, NS_PER_S)
    host.retire("brief")
    run(host, tally, NS_PER_S + RECENT_NS)

    assert tally.pods == {}
    assert tally.recent() == {}
