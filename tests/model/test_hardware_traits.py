"""What was measured of a card is chosen by the name that NVML tells, and is what plans for that card go by."""

from __future__ import annotations

import pytest

from qgpu.config import GpuSettings
from qgpu.daemon.gpu_loop import GpuLoop
from qgpu.model import (
    MAX_TIMESLICE_US,
    MIN_TIMESLICE_US,
    NS_PER_MS,
    Grant,
    Pod,
    PodClass,
    Snapshot,
    Tsg,
    hardware_traits,
)
from qgpu.planes.sim.host import SimHost
from qgpu.policies.registry import compose
from qgpu.sched.ledger import Ledger


@pytest.mark.parametrize(
    ("card", "row"),
    [
        ("NVIDIA H200", hardware_traits.H200),
        ("Simulated H200", hardware_traits.H200),
        ("NVIDIA H100 80GB HBM3", hardware_traits.H100),
        ("NVIDIA GH200 480GB", hardware_traits.OTHER),
        ("NVIDIA L40S", hardware_traits.OTHER),
        ("", hardware_traits.OTHER),
    ],
)
def test_a_row_is_chosen_by_a_word_of_the_cards_name(card: str, row: hardware_traits.HardwareTraits) -> None:
    assert hardware_traits.traits(card) == row


def test_only_the_h200s_latencies_are_its_own() -> None:
    assert [row.model for row in hardware_traits.ROWS if row.p99_measured] == ["H200"]


@pytest.mark.parametrize("row", [*hardware_traits.ROWS, hardware_traits.OTHER], ids=lambda row: row.model or "other")
def test_a_slice_is_found_by_the_turn_that_it_makes(row: hardware_traits.HardwareTraits) -> None:
    for slice_us in (MIN_TIMESLICE_US, 500, 12_345, MAX_TIMESLICE_US):
        assert row.slice_of_us(row.turn_ns(slice_us)) == slice_us
    assert row.slice_of_us(0) == MIN_TIMESLICE_US
    assert row.slice_of_us(10 * row.turn_ns(MAX_TIMESLICE_US)) == MAX_TIMESLICE_US


def test_plans_go_by_the_row_of_their_card(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = hardware_traits.HardwareTraits("Slow", 2048, 500_000, 500_000, ((50, 2000), (1000, 4000)), 1000)
    monkeypatch.setattr(hardware_traits, "ROWS", (*hardware_traits.ROWS, slow))
    online = Pod("on", Grant(PodClass.ONLINE, latency_target_ns=4 * NS_PER_MS), (Tsg("on", busy=True),))
    pods = tuple(Pod(name, Grant(cores=50), (Tsg(name, busy=True),)) for name in "ab")

    for mixed in (pods, (online, *pods)):
        fast_us, slow_us = (
            compose("burst-share", "best-effort")(Snapshot(0, 100 * NS_PER_MS, mixed, card=card)).pods[-1].timeslice_us
            for card in ("NVIDIA H200", "A Slow Card")
        )
        assert slow_us < 0.7 * fast_us


def test_the_daemon_tells_policies_the_cards_name() -> None:
    host = SimHost()
    running = GpuLoop(host, 0, GpuSettings())
    running.stop()

    assert Ledger(0, card="NVIDIA L4").snapshot(100 * NS_PER_MS).card == "NVIDIA L4"
    assert running.ledger.snapshot(100 * NS_PER_MS).card == host.pgpus()[0].name
