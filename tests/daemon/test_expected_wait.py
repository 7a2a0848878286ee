"""What sharing should add to an online pod's p99: known where it can be, and unknown elsewhere."""

from __future__ import annotations

from qgpu.daemon.expected_wait import expected_wait_p99_ns
from qgpu.model import NS_PER_MS, NS_PER_S, Grant, PodClass
from qgpu.planes.sim.host import SimHost
from qgpu.policies.registry import compose
from qgpu.sched import loop
from qgpu.sched.ledger import Ledger
from tests.contract.rig import FLOOD, PULSE

SETTINGS = loop.Settings(compose("burst-share", "best-effort"), 100 * NS_PER_MS)


def ledger_of(target_ns: int | None, *, flood: bool, card: str = "NVIDIA H200") -> Ledger:
    host = SimHost()
    host.admit("chat", {0: Grant(PodClass.ONLINE, latency_target_ns=target_ns)})
    host.start_load("chat", 0, PULSE)
    if flood:
        host.admit("flood", {0: Grant()})
        host.start_load("flood", 0, FLOOD)
    backend, ledger = host.backend(0), Ledger(0, card=card)
    while (ledger.now_ns or 0) < 2 * NS_PER_S:
        ledger = loop.tick(backend, SETTINGS, ledger)
    return ledger


def test_a_busy_offline_pod_adds_less_than_the_target() -> None:
    tight, loose = (
        expected_wait_p99_ns(ledger_of(target_ns, flood=True), "chat") for target_ns in (None, 2 * NS_PER_MS)
    )

    assert tight is not None
    assert loose is not None
    assert 0 < tight < loose < 2 * NS_PER_MS


def test_alone_it_waits_for_nobody() -> None:
    assert expected_wait_p99_ns(ledger_of(None, flood=False), "chat") == 0


def test_it_is_unknown_for_offline_pods_and_unmeasured_cards() -> None:
    assert expected_wait_p99_ns(ledger_of(None, flood=True), "flood") is None
    assert expected_wait_p99_ns(ledger_of(None, flood=True), "nobody") is None
    assert expected_wait_p99_ns(ledger_of(None, flood=True, card="NVIDIA L4"), "chat") is None
