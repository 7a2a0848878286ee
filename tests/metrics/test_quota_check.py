"""Who is below its quota, and why: played on the simulator, in virtual time."""

from __future__ import annotations

import pytest

from qgpu.load.workload import Workload
from qgpu.metrics.quota_check import below_quota
from qgpu.metrics.tally import Tally
from qgpu.model import NS_PER_MS, NS_PER_S, Grant, PodClass
from qgpu.planes.sim.host import SimHost
from qgpu.policies.registry import compose
from qgpu.sched import loop
from qgpu.sched.ledger import Ledger
from tests.contract.rig import FLOOD

#: 100 µs of work every 10 ms: at most 1 % of a card.
RARE = Workload(kernel_us=100, period_us=10_000)


def reasons(
    pods: dict[str, tuple[Grant, Workload]], policy: str = "burst-share", seconds: float = 6, not_guaranteed: str = ""
) -> dict[str, str]:
    """Play pods for a while; return each pod's reason to be below its quota."""
    host, tally, ledger = SimHost(), Tally(), Ledger(0)
    for name, (grant, work) in pods.items():
        host.admit(name, {0: grant})
        host.start_load(name, 0, work)
    backend = host.backend(0)
    settings = loop.Settings(compose(policy, "best-effort"), 100 * NS_PER_MS)
    while (ledger.now_ns or 0) < seconds * NS_PER_S:
        ledger = loop.tick(backend, settings, ledger)
        tally.watch(ledger)
    return {name: below_quota(name, ledger, tally.recent(), not_guaranteed) for name in pods}


def test_floods_that_get_their_quota_are_not_below_it() -> None:
    assert reasons({"two": (Grant(cores=60), FLOOD), "one": (Grant(cores=30), FLOOD), "none": (Grant(), FLOOD)}) == {
        "two": "",
        "one": "",
        "none": "",
    }


@pytest.mark.parametrize("beside", [{}, {"flood": (Grant(cores=40), FLOOD)}])
def test_a_pod_with_little_work_asks_for_less(beside: dict[str, tuple[Grant, Workload]]) -> None:
    found = reasons({"rare": (Grant(cores=40), RARE), **beside})

    assert found["rare"].startswith("asks for less: alone it would use ")
    assert not found.get("flood")


def test_a_policy_without_guarantees_is_named() -> None:
    pods = {"two": (Grant(cores=60), FLOOD), "one": (Grant(cores=30), FLOOD)}
    found = reasons(pods, "best-effort", not_guaranteed="best-effort")

    assert found == {"two": "policy best-effort guarantees no quota", "one": ""}


def test_the_policy_among_online_pods_is_told_from_the_others() -> None:
    pods = {name: (Grant(PodClass.ONLINE, cores), FLOOD) for name, cores in (("two", 60), ("one", 30))}
    found = reasons(pods, "best-effort", not_guaranteed="best-effort")

    assert found == {"two": "policy best-effort among online pods guarantees no quota", "one": ""}


def test_an_offline_pod_beside_online_work_waits_for_it() -> None:
    busy = Workload(kernel_us=8_000, period_us=10_000)
    found = reasons({"train": (Grant(cores=60), FLOOD), "chat": (Grant(PodClass.ONLINE), busy)})

    assert found["train"].startswith("waits: online pods run first, and were on the engine ")


def test_a_pod_whose_short_steps_wait_for_others_waits() -> None:
    steps = Workload(kernel_us=1_000, batch=2, gap_us=100)
    pods = {"steps": (Grant(cores=60), steps), "a": (Grant(), FLOOD), "b": (Grant(), FLOOD), "c": (Grant(), FLOOD)}

    assert reasons(pods, "best-effort")["steps"].startswith("waits: ")


def test_a_pod_that_has_just_begun_is_not_judged() -> None:
    assert not any(reasons({"rare": (Grant(cores=40), RARE)}, seconds=1).values())


def test_a_pod_without_quota_or_work_is_not_below_any() -> None:
    idle = Workload(kernel_us=100, period_us=60_000_000)
    assert reasons({"free": (Grant(), RARE), "idle": (Grant(cores=30), idle)}) == {"free": "", "idle": ""}
