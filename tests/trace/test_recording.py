"""A recording: what ticks tell, put together without losing or inventing a nanosecond."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.config import GpuSettings
from qgpu.daemon.gpu_loop import GpuLoop
from qgpu.model import NS_PER_MS, NS_PER_S, Grant, PodClass
from qgpu.nvidia.gpu_time import Event, GpuTimeCounter
from qgpu.planes.sim.host import SimHost
from qgpu.policies.registry import compose
from qgpu.sched import loop
from qgpu.sched.ledger import Ledger
from qgpu.trace import recorder as recorder_module
from qgpu.trace.recorder import Recorder
from qgpu.trace.recording import GpuTrack, shares
from qgpu.trace.wakeups import wakeups
from tests.contract.rig import FLOOD, PULSE

SETTINGS = loop.Settings(compose("fixed-share", "best-effort"), 100 * NS_PER_MS)


def tick(now_ms: int, *runs: tuple[int, int], told: bool = True, lost: int = 0) -> dict[str, Any]:
    spans = [(start * NS_PER_MS, end * NS_PER_MS) for start, end in runs]
    ran_ns = sum(end - start for start, end in spans)
    tsg = {"tsg": "1/2", "run_ns": ran_ns, "starts": len(spans), "runs": spans if told else []}
    pod = {"pod": "a", "class": "offline", "cores": 50, "state": "running", "used_ns": 0, "closed": []}
    pod["tsgs"] = [tsg]
    return {"gpu": 0, "now_ns": now_ms * NS_PER_MS, "lost": lost, "utilization": None, "pods": [pod]}


def track(*ticks: dict[str, Any]) -> GpuTrack:
    gpu = GpuTrack(0)
    for each in ticks:
        gpu.add(each)
    return gpu


def test_what_ran_before_details_were_told_is_left_out() -> None:
    gpu = track(tick(100, (0, 100), told=False), tick(200, (150, 200)), tick(300, (200, 250)))

    assert (gpu.first_ns, gpu.last_ns) == (200 * NS_PER_MS, 300 * NS_PER_MS)
    assert gpu.pods["a"].runs == [(200 * NS_PER_MS, 250 * NS_PER_MS)]
    assert gpu.pods["a"].ledger_ns == 50 * NS_PER_MS


def test_a_run_that_a_sample_cut_is_one_run() -> None:
    gpu = track(tick(0), tick(1), tick(100, (60, 100)), tick(200, (100, 130), (150, 200)))

    assert [(start // NS_PER_MS, end // NS_PER_MS) for start, end in gpu.pods["a"].runs] == [(60, 130), (150, 200)]


def test_tick_without_runs_is_a_gap_and_in_neither_total() -> None:
    gpu = track(tick(0), tick(1), tick(100, (60, 100)), tick(200, (100, 200), told=False), tick(300, (200, 210)))

    assert gpu.gaps == 1
    assert gpu.pods["a"].traced_ns == gpu.pods["a"].ledger_ns == 50 * NS_PER_MS


def test_switches_lost_before_the_recording_are_not_its_own() -> None:
    assert track(tick(0, lost=7), tick(1, lost=7), tick(2, lost=9)).lost == 2


def test_runs_that_miss_the_ledger_are_an_error() -> None:
    gpu = track(tick(0), tick(1), tick(100, (0, 100)))
    gpu.pods["a"].runs.clear()

    assert gpu.pods["a"].error == 1.0


def test_a_pods_state_holds_until_a_tick_tells_another() -> None:
    told = ["running", "running", "suspending", "suspended", "suspended", "resuming", "running", "running"]
    ticks = [tick(100 * number) for number in range(len(told))]
    for each, state in zip(ticks, told, strict=True):
        each["pods"][0]["state"] = state
    pod = track(*ticks).pods["a"]

    assert pod.suspended
    assert [(start // NS_PER_MS, end // NS_PER_MS, state) for start, end, state in pod.stays] == [
        (100, 200, "running"),
        (200, 300, "suspending"),
        (300, 500, "suspended"),
        (500, 600, "resuming"),
        (600, 700, "running"),
    ]


def test_where_a_pod_was_while_no_tick_named_it_is_not_known() -> None:
    ticks = [tick(100 * number) for number in range(6)]
    ticks[3]["pods"] = []
    pod = track(*ticks).pods["a"]  # of an earlier daemon, which tells no states

    assert not pod.suspended
    assert [(start // NS_PER_MS, end // NS_PER_MS) for start, end, _ in pod.stays] == [(100, 200), (400, 500)]


def test_unfetched_ticks_are_dropped_oldest_first_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_SPANS", 40)
    host = SimHost()
    host.admit("a", {0: Grant()})
    host.start_load("a", 0, FLOOD)
    backend, ledger, recorder = host.backend(0), Ledger(0), Recorder(0)
    backend.detailed = True
    for _ in range(50):
        ledger = loop.tick(backend, SETTINGS, ledger)
        recorder.watch(ledger, 0)
    kept = recorder.fetch()

    assert recorder.dropped > 0
    assert kept[-1]["now_ns"] == ledger.now_ns
    assert sum(1 + len(pod["tsgs"][0]["runs"]) for each in kept for pod in each["pods"]) <= 40
    assert recorder.fetch() == []


def test_nobody_has_to_fetch_what_is_told_of_an_empty_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_SPANS", 80)
    backend, ledger, recorder = SimHost().backend(0), Ledger(0), Recorder(0)
    for _ in range(50):
        ledger = loop.tick(backend, SETTINGS, ledger)
        recorder.watch(ledger, 0)

    assert len(recorder.fetch()) <= 10
    assert recorder.dropped == 0


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from("ab"), st.booleans()), max_size=60),
    st.sets(st.integers(0, 60)),
)
def test_the_spans_of_a_meter_add_up_to_its_totals(steps: list[tuple[int, str, bool]], looks: set[int]) -> None:
    counter, now_ns, spans = GpuTimeCounter(), 0, {"a": 0, "b": 0}
    counter.record(wanted=True)
    for number, (pause_ns, who, start) in enumerate(steps):
        now_ns += pause_ns
        counter.advance([Event(now_ns, who, start)], now_ns + pause_ns // 2)
        if number in looks:
            for name, found in counter.record(wanted=True).items():
                spans[str(name)] += sum(end - begin for begin, end in found)
    for name, found in counter.record(wanted=False).items():
        spans[str(name)] += sum(end - begin for begin, end in found)

    assert spans == {name: counter.totals[name].run_ns if name in counter.totals else 0 for name in "ab"}
    assert counter.spans is None


def test_simulated_runs_and_closed_gates_sum_to_sample_totals() -> None:
    host = SimHost()
    for name, cores in (("two", 40), ("one", 20)):
        host.admit(name, {0: Grant(cores=cores)})
        host.start_load(name, 0, FLOOD)
    host.admit("chat", {0: Grant(PodClass.ONLINE)})
    host.start_load("chat", 0, PULSE)
    backend, ledger = host.backend(0), Ledger(0)
    backend.detailed = True
    seen = []
    for _ in range(30):
        ledger = loop.tick(backend, SETTINGS, ledger)
        seen += [account.last for account in ledger.accounts.values()]

    assert any(pod.closed for pod in seen)
    assert any(len(tsg.runs) > 1 for pod in seen for tsg in pod.tsgs)
    for pod in seen:
        assert sum(end - start for start, end in pod.closed) == pod.gated_ns
        for tsg in pod.tsgs:
            assert sum(end - start for start, end in tsg.runs) == tsg.run_ns
            assert list(tsg.runs) == sorted(tsg.runs)
    runs = sorted(run for pod in seen for tsg in pod.tsgs for run in tsg.runs)
    assert all(before[1] <= after[0] for before, after in pairwise(runs)), "one engine, one at a time"


def test_recording_changes_nothing_of_what_pods_get() -> None:
    used = []
    for detailed in (False, True):
        host = SimHost()
        for name, cores in (("two", 60), ("one", 30)):
            host.admit(name, {0: Grant(cores=cores)})
            host.start_load(name, 0, FLOOD)
        backend, ledger = host.backend(0), Ledger(0)
        backend.detailed = detailed
        while (ledger := loop.tick(backend, SETTINGS, ledger)).now_ns < 3 * NS_PER_S:
            pass
        used.append({name: account.used_ns for name, account in ledger.accounts.items()})

    assert used[0] == used[1]


def test_wakeup_is_online_run_that_follows_another_pods_run() -> None:
    gpu = track(tick(0), tick(1), tick(100, (10, 40), (41, 60)))
    online = track(tick(0), tick(1), tick(100, (5, 9), (40, 41), (60, 61), (70, 71))).pods.pop("a")
    gpu.pods["chat"] = online

    assert [(wake.at_ns // NS_PER_MS, wake.took_from) for wake in wakeups(gpu, online)] == [(40, "a"), (60, "a")]


def test_details_are_asked_for_only_while_somebody_records() -> None:
    host = SimHost()
    running, recorder = GpuLoop(host, 0, GpuSettings()), Recorder(0)
    clock = host.backend(0)
    try:
        assert not clock.detailed
        running.watch(recorder.watch, detailed=True)
        while not clock.detailed:
            time.sleep(0.01)
        running.unwatch(recorder.watch)
        assert not clock.detailed
    finally:
        running.stop()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 50)), max_size=20), st.integers(1, 90))
def test_shares_of_all_stretches_add_up_to_the_runs(gaps: list[tuple[int, int]], step: int) -> None:
    runs, at = [], 0
    for pause, length in gaps:
        runs.append((at + pause, at + pause + length))
        at += pause + length
    found = list(shares(runs, 0, max(at, 1), step))

    assert sum(share * min(step, max(at, 1) - start) for start, share in found) == pytest.approx(
        sum(length for _, length in gaps)
    )
    assert all(0 <= share <= 1 for _, share in found)
