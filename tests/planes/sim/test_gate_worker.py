"""The gate worker under any plan: nobody runs outside the windows, and no time is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.load.workload import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, NS_PER_US, Grant, OnIdle, Plan, PodClass, PodPlan
from qgpu.model.tsg_turns import CHECK_NS
from qgpu.planes.sim.engine import Tsg
from qgpu.planes.sim.hardware import H200
from qgpu.planes.sim.host import SimHost
from qgpu.policies.mechanism import consecutive_windows

PERIOD = 100 * NS_PER_MS

#: A gate may close this late: its own call, and the one that was under way.
LATE = H200.contended_close_ns + H200.contended_open_ns

workloads = st.builds(
    Workload,
    kernel_us=st.integers(50, 20_000),
    batch=st.integers(0, 4),
    gap_us=st.sampled_from([0, 100, 30_000]),
)


@st.composite
def plans(draw: st.DrawFn, pods: int) -> Plan:
    """Draw turns of at least 3 ms that fit in the period, some of no length, each yielding or not."""
    lengths = [draw(st.one_of(st.just(0), st.integers(3, 100 // pods))) * NS_PER_MS for _ in range(pods)]
    turns = consecutive_windows(lengths, draw(st.sampled_from(OnIdle)))
    timeslices = draw(st.lists(st.integers(50, 20_000), min_size=pods, max_size=pods))
    parts = (
        PodPlan(f"pod{i}", PodClass.OFFLINE, timeslice, windows)
        for i, (timeslice, windows) in enumerate(zip(timeslices, turns, strict=True))
    )
    return Plan(0, PERIOD, tuple(parts))


@given(st.data(), st.lists(workloads, min_size=1, max_size=4))
def test_no_pod_runs_longer_than_its_windows_and_no_time_is_lost(data: st.DataObject, loads: list[Workload]) -> None:
    plan = data.draw(plans(len(loads)))
    keeps = all(window.on_idle is OnIdle.KEEP for part in plan.pods for window in part.windows or ())
    host = SimHost()
    for i, load in enumerate(loads):
        host.admit(f"pod{i}", {0: Grant()})
        host.start_load(f"pod{i}", 0, load)
    backend = host.backend(0)
    backend.sample()
    backend.apply(plan)
    backend.wait(PERIOD)
    began_ns = backend.sample().now_ns
    ran: dict[str, int] = {}
    gated: dict[str, int] = {}
    for _ in range(5):
        backend.apply(plan)
        backend.wait(PERIOD)
        for pod in backend.sample().pods:
            ran[pod.pod] = ran.get(pod.pod, 0) + sum(tsg.run_ns for tsg in pod.tsgs)
            gated[pod.pod] = gated.get(pod.pod, 0) + pod.gated_ns
    passed_ns = backend.now_ns - began_ns
    times = host.times(0)

    assert passed_ns == 5 * PERIOD
    assert times.useful_ns + times.switching_ns + times.idle_ns == backend.now_ns
    assert sum(ran.values()) <= passed_ns
    for part in plan.pods:
        # A context may still be restored when its gate has just closed: that is charged to it too.
        assert ran[part.pod] + gated[part.pod] <= passed_ns + 5 * 2 * H200.switch_ns
        if keeps:
            window_ns = sum(window.end_ns - window.start_ns for window in part.windows or ())
            assert ran[part.pod] <= 5 * (window_ns + LATE + 2 * H200.switch_ns)


@given(st.data(), st.integers(1, 4))
def test_whatever_the_plan_was_its_lease_ends(data: st.DataObject, pods: int) -> None:
    plan = data.draw(plans(pods))
    host = SimHost()
    for i in range(pods):
        host.admit(f"pod{i}", {0: Grant()})
        host.start_load(f"pod{i}", 0, Workload(kernel_us=1000, batch=0))
    backend = host.backend(0)
    backend.sample()
    backend.apply(plan)
    backend.wait(H200.lease_ns + 10 * NS_PER_MS)
    backend.sample()
    backend.wait(NS_PER_S)
    after = backend.sample().pods
    ran = [sum(tsg.run_ns for tsg in pod.tsgs) for pod in after]

    assert max(ran) - min(ran) <= 2 * (H200.default_timeslice_us * NS_PER_US + H200.switch_ns)
    assert all(pod.gated_ns == 0 for pod in after)


@given(st.data(), st.lists(st.lists(workloads, min_size=1, max_size=3), min_size=1, max_size=3), st.integers(5, 300))
def test_process_turns_nest_in_windows_and_none_stays_off(
    data: st.DataObject, pods: list[list[Workload]], turn_ms: int
) -> None:
    plan = data.draw(plans(len(pods)))
    plan = replace(plan, pods=tuple(replace(part, tsg_turn_ns=turn_ms * NS_PER_MS) for part in plan.pods))
    host = SimHost()
    for i, loads in enumerate(pods):
        host.admit(f"pod{i}", {0: Grant()})
        for load in loads:
            host.start_load(f"pod{i}", 0, load)
    backend = host.backend(0)
    for _ in range(20):
        backend.sample()
        backend.apply(plan)
        backend.wait(PERIOD)
        for pod in host._world.cards[0].gpu.pods.values():
            assert not all(tsg.resting for tsg in pod.tsgs)
    backend.wait(H200.lease_ns + 100 * NS_PER_MS)
    backend.sample()

    assert not [tsg for tsg in tsgs_of(host) if not tsg.open]
    times = host.times(0)
    assert times.useful_ns + times.switching_ns + times.idle_ns == backend.now_ns


@pytest.mark.parametrize("processes", [2, 5])
def test_one_of_a_pods_busy_processes_is_open_at_a_time(processes: int) -> None:
    host = SimHost()
    host.admit("a", {0: Grant()})
    for _ in range(processes):
        host.start_load("a", 0, Workload(kernel_us=1000, batch=0))
    backend = host.backend(0)
    plan = Plan(0, PERIOD, (PodPlan("a", PodClass.OFFLINE, 50, tsg_turn_ns=PERIOD),))
    starts, ran = 0, dict.fromkeys(range(processes), 0)
    for tick in range(10 * processes + 2):
        backend.apply(plan)
        backend.wait(PERIOD)
        (pod,) = backend.sample().pods
        assert pod.gated_ns == 0
        if tick > 1:
            starts += sum(tsg.starts for tsg in pod.tsgs)
            ran = {at: ran[at] + tsg.run_ns for at, tsg in enumerate(pod.tsgs)}

    assert starts <= 20 * processes
    assert max(ran.values()) - min(ran.values()) <= 2 * PERIOD


def test_process_of_pod_removed_while_closing_is_reopened() -> None:
    host = SimHost()
    host.admit("a", {0: Grant()})
    for _ in range(2):
        host.start_load("a", 0, Workload(kernel_us=1000, batch=0))
    backend = host.backend(0)
    host.call_at(0, CHECK_NS + H200.close_ns // 2, lambda: host.retire("a"))
    backend.sample()
    backend.apply(Plan(0, PERIOD, (PodPlan("a", PodClass.OFFLINE, 50, tsg_turn_ns=PERIOD),)))
    backend.wait(2 * CHECK_NS)
    backend.wait(2 * CHECK_NS)

    assert not [tsg for tsg in tsgs_of(host) if not tsg.open]


def tsgs_of(host: SimHost) -> list[Tsg]:
    """Return all TSGs of the simulated card."""
    return list(host._world.cards[0].gpu.engine.runlist)


def test_gate_calls_run_one_after_the_other_despite_changes() -> None:
    host = SimHost()
    for name in ("a", "b", "c"):
        host.admit(name, {0: Grant()})
        host.start_load(name, 0, Workload(kernel_us=1000, batch=0))
    backend = host.backend(0)
    closed = tuple(PodPlan(name, PodClass.OFFLINE, 2048, ()) for name in ("a", "b"))
    host.call_at(0, H200.contended_close_ns // 2, lambda: host.admit("d", {0: Grant()}))
    backend.sample()
    backend.apply(Plan(0, PERIOD, closed))
    backend.wait(10 * NS_PER_MS)
    backend.apply(Plan(0, PERIOD, closed))
    gated = {pod.pod: pod.gated_ns for pod in backend.sample().pods}
    backend.wait(10 * NS_PER_MS - backend.now_ns)
    for pod in backend.sample().pods:
        gated[pod.pod] += pod.gated_ns

    close_ns = H200.contended_close_ns
    assert gated == {"a": 10 * NS_PER_MS - close_ns, "b": 10 * NS_PER_MS - 2 * close_ns, "c": 0, "d": 0}
