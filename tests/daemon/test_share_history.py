"""The last hour: points are true shares, and what is kept is bounded."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.daemon.share_history import MAX_PODS, OTHERS, POINTS, STEP_NS, ShareHistory
from qgpu.model import NS_PER_MS, NS_PER_S, Grant, PodSample, Sample, TsgSample
from qgpu.planes.sim.host import SimHost
from qgpu.policies.registry import compose
from qgpu.sched import loop
from qgpu.sched.ledger import Ledger
from tests.contract.rig import FLOOD

SETTINGS = loop.Settings(compose("fixed-share", "best-effort"), 100 * NS_PER_MS)


def history() -> ShareHistory:
    return ShareHistory(lambda: "fixed-share", lambda: 5.0)


def run(host: SimHost, kept: ShareHistory, ledger: Ledger, duration_ns: int) -> Ledger:
    backend, until_ns = host.backend(0), (ledger.now_ns or 0) + duration_ns
    while (ledger.now_ns or 0) < until_ns:
        ledger = loop.tick(backend, SETTINGS, ledger)
        kept.watch(ledger)
    return ledger


def test_points_are_the_shares_of_their_quarter_minutes() -> None:
    host, kept = SimHost(), history()
    for name, cores in (("two", 40), ("one", 20)):
        host.admit(name, {0: Grant(cores=cores)})
        host.start_load(name, 0, FLOOD)
    ledger = run(host, kept, Ledger(0), 2 * STEP_NS + NS_PER_S)
    host.retire("one")
    run(host, kept, ledger, 2 * STEP_NS)
    points = kept.to_json()["points"]

    assert [point["shares"]["two"] for point in points] == pytest.approx([0.4] * 4, abs=0.01)
    assert [point["shares"]["one"] for point in points[:2]] == pytest.approx([0.2] * 2, abs=0.01)
    assert 0 < points[2]["shares"]["one"] < 0.05, "what it used before it ended counts"
    assert "one" not in points[3]["shares"]
    assert {(point["at"], point["policy"]) for point in points} == {(5.0, "fixed-share")}


@given(st.lists(st.integers(0, STEP_NS), min_size=1, max_size=200))
def test_many_pods_are_summed_and_lose_no_time(ran_ns: list[int]) -> None:
    kept, ledger = history(), Ledger(0)
    for at, scale in ((0, 0), (STEP_NS, 1)):
        pods = tuple(
            PodSample(f"p{n}", Grant(), (TsgSample("t", scale * each // len(ran_ns), scale),))
            for n, each in enumerate(ran_ns)
        )
        ledger = ledger.advance(Sample(0, at, pods))
        kept.watch(ledger)
    shares = kept.to_json()["points"][0]["shares"]

    assert len(shares) <= MAX_PODS + 1
    assert sum(shares.values()) == pytest.approx(sum(ran_ns) / len(ran_ns) / STEP_NS, abs=1e-4 * (MAX_PODS + 1))
    assert shares.get(OTHERS, 0) <= sum(shares.values())


def test_an_hour_of_short_lived_pods_stays_bounded() -> None:
    kept, ledger = history(), Ledger(0)
    for point in range(2 * POINTS):
        pods = tuple(
            PodSample(f"p{point}-{n}", Grant(), (TsgSample("t", NS_PER_S // 10, 1),)) for n in range(2 * MAX_PODS)
        )
        ledger = ledger.advance(Sample(0, point * STEP_NS, pods))
        kept.watch(ledger)
    told = kept.to_json()

    assert len(told["points"]) == POINTS
    assert all(len(point["shares"]) <= MAX_PODS + 1 for point in told["points"])
    assert len(json.dumps(told)) < 1 << 20
