"""The sim plane behind the seam: pods, plans, leases and both clocks."""

from __future__ import annotations

import os
import threading
import time

import pytest

from qgpu.errors import BackendGoneError, RefusedError, UnknownNameError
from qgpu.linux import proc
from qgpu.load.workload import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, Grant, OnIdle, Plan, PodClass, PodPlan, Window
from qgpu.planes.sim.hardware import H200
from qgpu.planes.sim.host import Clock, SimBackend, SimHost

FLOOD = Workload(kernel_us=1000, batch=0)
PERIOD = 100 * NS_PER_MS
SECOND = NS_PER_S


def flooded(*names: str) -> tuple[SimHost, SimBackend, dict[str, int]]:
    """Make a host with pods that flood, and a backend that has seen them."""
    host = SimHost()
    loads = {}
    for name in names:
        host.admit(name, {0: Grant()})
        loads[name] = host.start_load(name, 0, FLOOD)
    backend = host.backend(0)
    backend.sample()
    return host, backend, loads


def part(pod: str, timeslice_us: int = 2048, windows: tuple[Window, ...] | None = None) -> PodPlan:
    return PodPlan(pod, PodClass.OFFLINE, timeslice_us, windows)


def hold(backend: SimBackend, plan: Plan, seconds: int) -> dict[str, float]:
    """Renew a plan for so long and return each pod's share of the card."""
    backend.apply(plan)
    backend.sample()
    ran: dict[str, int] = {}
    for _ in range(seconds * NS_PER_S // PERIOD):
        backend.wait(PERIOD)
        backend.apply(plan)
        for pod in backend.sample().pods:
            ran[pod.pod] = ran.get(pod.pod, 0) + sum(tsg.run_ns for tsg in pod.tsgs)
    return {name: ns / (seconds * NS_PER_S) for name, ns in ran.items()}


def test_timeslices_of_a_plan_are_the_ratio_of_shares() -> None:
    _, backend, _ = flooded("a", "b")

    shares = hold(backend, Plan(0, PERIOD, (part("a", 60_000), part("b", 20_000))), 10)

    assert shares["a"] / shares["b"] == pytest.approx(3, rel=0.01)
    assert sum(shares.values()) > 0.99


def test_a_pod_gets_its_windows_and_nothing_outside_them() -> None:
    _, backend, _ = flooded("a", "b")
    windows = ((Window(0, 70 * NS_PER_MS),), (Window(70 * NS_PER_MS, PERIOD),))

    shares = hold(backend, Plan(0, PERIOD, (part("a", windows=windows[0]), part("b", windows=windows[1]))), 10)

    assert shares["a"] == pytest.approx(0.70, abs=0.01)
    assert shares["b"] == pytest.approx(0.30, abs=0.01)


def test_gated_time_is_reported() -> None:
    _, backend, _ = flooded("a")
    plan = Plan(0, PERIOD, (part("a", windows=(Window(0, 25 * NS_PER_MS),)),))
    hold(backend, plan, 1)

    backend.wait(PERIOD)
    backend.apply(plan)
    (pod,) = backend.sample().pods

    assert pod.gated_ns == pytest.approx(75 * NS_PER_MS, rel=0.01)


def test_a_pod_with_no_window_never_runs() -> None:
    _, backend, _ = flooded("a", "b")
    plan = Plan(0, PERIOD, (part("a", windows=()), part("b")))
    hold(backend, plan, 1)

    assert hold(backend, plan, 1) == {"a": 0, "b": 1}


@pytest.mark.parametrize(("on_idle", "share"), [(OnIdle.YIELD, 0.98), (OnIdle.KEEP, 0.5)])
def test_the_window_of_an_idle_pod_is_lent_if_the_plan_says_so(on_idle: OnIdle, share: float) -> None:
    host, backend, loads = flooded("idle", "busy")
    host.stop_load(loads["idle"])
    backend.sample()
    half = PERIOD // 2
    windows = ((Window(0, half, on_idle),), (Window(half, PERIOD, on_idle),))

    shares = hold(backend, Plan(0, PERIOD, (part("idle", windows=windows[0]), part("busy", windows=windows[1]))), 5)

    assert shares["busy"] == pytest.approx(share, abs=0.015)


def test_a_window_is_not_lent_while_its_pod_runs_in_it_at_all() -> None:
    host, backend, loads = flooded("rare", "busy")
    host.stop_load(loads["rare"])
    host.start_load("rare", 0, Workload(kernel_us=1000, batch=1, period_us=10_000))
    backend.sample()
    windows = (Window(0, PERIOD // 2, OnIdle.YIELD),), (Window(PERIOD // 2, PERIOD, OnIdle.YIELD),)

    shares = hold(backend, Plan(0, PERIOD, (part("rare", windows=windows[0]), part("busy", windows=windows[1]))), 5)

    # As on a card, a pod that has begun its turn is charged while it idles: others are kept off for it.
    assert shares == {"rare": pytest.approx(0.45, abs=0.06), "busy": pytest.approx(0.5, abs=0.015)}


def test_a_plan_that_is_not_renewed_ends_with_its_lease() -> None:
    _, backend, _ = flooded("a")
    backend.apply(Plan(0, PERIOD, (part("a", windows=()),)))

    backend.wait(H200.lease_ns)
    (while_leased,) = backend.sample().pods
    backend.wait(SECOND)
    (afterwards,) = backend.sample().pods

    assert while_leased.tsgs[0].run_ns < 2 * NS_PER_MS
    assert afterwards.tsgs[0].run_ns > 0.999 * SECOND


def test_pods_survive_dead_daemon_and_successor_takes_over() -> None:
    host, dead, _ = flooded("a", "b")
    dead.apply(Plan(0, PERIOD, (part("a", windows=()), part("b"))))
    dead.wait(PERIOD)

    successor = host.backend(0)
    found = successor.sample()
    shares = hold(successor, Plan(0, PERIOD, (part("a"), part("b"))), 4)

    assert [pod.pod for pod in found.pods] == ["a", "b"]
    assert shares["a"] == pytest.approx(shares["b"], rel=0.01)


def test_closing_opens_every_gate_and_ends_every_verb() -> None:
    host, backend, _ = flooded("a")
    backend.apply(Plan(0, PERIOD, (part("a", windows=()),)))
    backend.wait(PERIOD)
    backend.close()
    backend.close()
    other = host.backend(0)
    other.sample()
    other.wait(SECOND)

    assert other.sample().pods[0].tsgs[0].run_ns > 0.999 * SECOND
    with pytest.raises(BackendGoneError):
        backend.sample()


def test_plan_for_another_pgpu_is_refused_and_old_one_stays() -> None:
    _, backend, _ = flooded("a")
    backend.apply(Plan(0, PERIOD, (part("a", windows=()),)))
    with pytest.raises(RefusedError, match="pGPU 1"):
        backend.apply(Plan(1, PERIOD, (part("a"),)))
    backend.wait(PERIOD)
    backend.sample()
    backend.wait(PERIOD)

    assert backend.sample().pods[0].tsgs[0].run_ns == 0


def test_gone_pods_are_skipped_and_unplanned_ones_run_freely() -> None:
    _, backend, _ = flooded("a")

    assert hold(backend, Plan(0, PERIOD, (part("ghost", windows=()),)), 1)["a"] > 0.999


def test_process_started_under_a_plan_gets_its_pods_timeslice() -> None:
    host, backend, _ = flooded("a", "b")
    plan = Plan(0, PERIOD, (part("a", 30_000), part("b", 10_000)))
    backend.apply(plan)
    host.start_load("b", 0, FLOOD)
    backend.sample()

    shares = hold(backend, plan, 10)

    assert shares["a"] / shares["b"] == pytest.approx(30 / 20, rel=0.02)


def test_a_retired_pod_runs_on_ungated_and_can_still_be_stopped() -> None:
    host, backend, loads = flooded("a")
    backend.apply(Plan(0, PERIOD, (part("a", windows=()),)))
    backend.wait(PERIOD)
    host.retire("a")
    backend.sample()
    before = host.progress(loads["a"]).kernels
    backend.wait(SECOND)

    assert backend.sample().pods == ()
    assert host.progress(loads["a"]).kernels - before == pytest.approx(1000, abs=2)
    host.stop_load(loads["a"])
    assert host.times(0).useful_ns > 0


def test_what_changes_on_a_pgpu_ends_a_wait() -> None:
    host, backend, _ = flooded("a")
    host.call_at(0, 5 * NS_PER_MS, lambda: host.amend("a", {0: Grant(cores=30)}))
    before_ns = backend.now_ns

    backend.wait(PERIOD)
    sample = backend.sample()

    assert backend.now_ns - before_ns == 5 * NS_PER_MS
    assert sample.pods[0].grant == Grant(cores=30)


def test_unknown_names_are_said() -> None:
    host, _, _ = flooded("a")

    for call in (
        lambda: host.backend(1),
        lambda: host.amend("ghost", {}),
        lambda: host.admit("b", {3: Grant()}),
        lambda: host.start_load("ghost", 0, FLOOD),
        lambda: host.progress(99),
    ):
        with pytest.raises(UnknownNameError):
            call()
    assert [pod.name for pod in host.pods()] == ["a"]


def test_a_pod_must_have_been_granted_what_it_uses() -> None:
    host = SimHost(gpus=2)
    host.admit("a", {0: Grant()})

    with pytest.raises(RefusedError, match="granted nothing on pGPU 1"):
        host.start_load("a", 1, FLOOD)
    with pytest.raises(RefusedError, match="already"):
        host.admit("a", {1: Grant()})


def test_a_grant_is_not_taken_from_under_running_work() -> None:
    host, _, loads = flooded("a")
    with pytest.raises(RefusedError, match="stop its work"):
        host.amend("a", {})
    host.stop_load(loads["a"])
    host.amend("a", {})

    assert host.backend(0).sample().pods == ()


def test_attached_processes_are_shown_while_they_live() -> None:
    host = SimHost()
    host.admit("a", {0: Grant()})
    read_end, write_end = os.pipe()
    host.attach("a", os.getpid(), [read_end, write_end])
    host.attach("a", 2**22 + 1, [])

    assert host.pods()[0].pids == (os.getpid(),)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read_end)


def test_in_real_time_the_card_goes_with_the_monotonic_clock() -> None:
    host = SimHost(clock=Clock.REAL)
    host.admit("a", {0: Grant()})
    load = host.start_load("a", 0, FLOOD)
    backend = host.backend(0)
    first = backend.sample()
    backend.wait(20 * NS_PER_MS)
    second = backend.sample()

    assert second.now_ns <= time.monotonic_ns()
    assert second.now_ns - first.now_ns >= 19 * NS_PER_MS
    assert second.pods[0].tsgs[0].run_ns == pytest.approx(second.now_ns - first.now_ns, abs=H200.switch_ns)
    assert host.progress(load).kernels >= 18


def test_in_real_time_a_change_wakes_a_waiting_loop() -> None:
    host = SimHost(clock=Clock.REAL)
    backend = host.backend(0)
    backend.sample()
    waiting = threading.Thread(target=backend.wait, args=(600 * NS_PER_S,))
    waiting.start()
    host.admit("a", {0: Grant()})
    waiting.join(timeout=60)

    assert not waiting.is_alive()


def test_process_with_reused_pid_is_not_the_pods(monkeypatch):
    host = SimHost()
    host.admit("a", {0: Grant()})
    host.attach("a", os.getpid(), [])
    before = host.pods()[0].pids
    stat = proc.stat(os.getpid())
    monkeypatch.setattr(proc, "stat", lambda pid: [*stat[:19], str(int(stat[19]) + 1), *stat[20:]])

    assert (before, host.pods()[0].pids) == ((os.getpid(),), ())
