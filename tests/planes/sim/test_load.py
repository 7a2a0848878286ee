"""Workloads on a simulated pGPU: when the host launches, and what is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qgpu.errors import InvalidValueError
from qgpu.load.workload import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, Grant
from qgpu.planes.sim.gpu import SimGpu
from qgpu.planes.sim.hardware import H200, Hardware
from qgpu.planes.sim.load import Load

#: A card and a host without prices, so that numbers come out round.
FREE = replace(
    H200, timeslice_short_ns=0, save_ns=0, gap_ns=0, restore_ns=0, launch_ns=0, notice_ns=0, jitter_ns=0, late_ns=0
)


def load_of(workload: Workload, hardware: Hardware = FREE) -> tuple[SimGpu, Load]:
    gpu = SimGpu(0, hardware)
    gpu.add_pod("pod", Grant())
    return gpu, Load(gpu, "pod", workload, seed="pod")


def test_a_flood_keeps_the_card_busy() -> None:
    gpu, load = load_of(Workload(kernel_us=1000, batch=0))

    gpu.advance(NS_PER_S)

    assert load.progress().kernels == 1000
    assert load.progress().latencies_us == ()


def test_launches_one_by_one_leave_gaps_on_an_empty_card() -> None:
    gpu, load = load_of(Workload(kernel_us=50, batch=10, launch_us=100))

    gpu.advance(NS_PER_S)

    # The last kernel is launched after 0.9 ms and takes 50 us: 0.95 ms a batch, of which 0.5 ms are work.
    assert load.progress().kernels == pytest.approx(10 / 0.95e-3, rel=0.01)
    assert gpu.engine.times.idle_ns == pytest.approx(0.45 / 0.95 * NS_PER_S, rel=0.01)


def test_launches_queue_up_while_the_gate_is_closed() -> None:
    gpu, load = load_of(Workload(kernel_us=50, batch=10, launch_us=100))
    gpu.pods["pod"].move(0, to_open=False)
    gpu.advance(NS_PER_MS)
    gpu.pods["pod"].move(gpu.now_ns, to_open=True)

    gpu.advance(gpu.now_ns + NS_PER_MS // 2)

    assert load.kernels == 10


def test_a_closed_loop_waits_for_each_batch_and_then_for_its_gap() -> None:
    gpu, load = load_of(Workload(kernel_us=1000, batch=3, gap_us=2000))

    gpu.advance(NS_PER_S)
    progress = load.progress()

    assert progress.kernels == 600
    assert set(progress.latencies_us) == {3000.0}


def test_a_periodic_load_launches_once_a_period() -> None:
    gpu, load = load_of(Workload(kernel_us=100, period_us=10_000))

    gpu.advance(NS_PER_S)

    assert load.progress().kernels == 100


def test_a_periodic_load_leaves_out_periods_it_missed() -> None:
    gpu, load = load_of(Workload(kernel_us=15_000, period_us=10_000))

    gpu.advance(NS_PER_S)

    assert load.progress().kernels == 50


@pytest.mark.parametrize("batch", [0, 1, 7])
def test_a_load_of_so_many_kernels_ends_after_them(batch: int) -> None:
    gpu, load = load_of(Workload(kernel_us=1000, batch=batch, count=25))

    gpu.advance(NS_PER_S)
    progress = load.progress()

    assert (progress.kernels, progress.elapsed_s, progress.done) == (25, 0.025, True)
    assert gpu.engine.runlist == []


def test_load_with_duration_ends_after_warmup_and_duration() -> None:
    gpu, load = load_of(Workload(kernel_us=1000, batch=1, duration_s=0.2, warmup_s=0.1))

    gpu.advance(NS_PER_S)
    progress = load.progress()

    assert (progress.kernels, progress.elapsed_s, progress.done) == (200, 0.2, True)
    assert progress.gpu_ns == 300 * NS_PER_MS


def test_a_trace_is_played_as_it_was_recorded() -> None:
    gpu, load = load_of(Workload(trace=((0, 100), (50, 100), (1000, 300))))

    gpu.advance(NS_PER_S)
    progress = load.progress()

    assert progress.latencies_us == (100.0, 150.0, 300.0)
    assert (progress.kernels, progress.done) == (3, True)


def test_latencies_are_reported_once() -> None:
    gpu, load = load_of(Workload(kernel_us=1000))
    gpu.advance(10 * NS_PER_MS)

    assert len(load.progress().latencies_us) == 10
    assert load.progress().latencies_us == ()


def test_the_same_seed_gives_the_same_run() -> None:
    runs = []
    for _ in range(2):
        gpu, load = load_of(Workload(kernel_us=100, period_us=1000), H200)
        gpu.advance(NS_PER_S)
        runs.append(load.progress())

    assert runs[0] == runs[1]
    assert len(set(runs[0].latencies_us)) > 100


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({"kernel": 5}, "unknown key 'kernel'"),
        ({"kernel_us": "fast"}, "kernel_us 'fast': must be a number"),
        ({"kernel_us": 0}, "kernel_us 0: must be 0.1 to"),
        ({"kernel_us": float("nan")}, "kernel_us nan: must be 0.1 to"),
        ({"batch": 1.5}, "batch 1.5: must be a whole number"),
        ({"batch": True}, "batch True: must be a whole number"),
        ({"batch": -1}, "batch -1: must be 0 to"),
        ({"gap_us": -1}, "gap_us -1"),
        ({"graph": "yes"}, "graph 'yes': must be true or false"),
        ({"batch": 0, "period_us": 10}, "period_us needs a batch"),
        ({"batch": 0, "launch_us": 10}, "launch_us needs a batch"),
        ({"batch": 4, "launch_us": 10, "graph": True}, "launch_us needs a batch"),
        ({"trace": "x"}, "trace: must be a list"),
        ({"trace": [[1]]}, "[1] is not an [at_us, kernel_us] pair"),
        ({"trace": [[5, 1], [4, 1]]}, "4 µs comes after 5 µs"),
    ],
)
def test_bad_workload_is_refused_in_one_line_naming_the_key(raw: dict[str, object], complaint: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        Workload.from_dict(raw)

    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workload", [Workload(), Workload(batch=0), Workload(trace=((0, 1), (2.5, 3)))])
def test_a_workload_survives_its_dict_form(workload: Workload) -> None:
    assert Workload.from_dict(workload.to_dict()) == workload
