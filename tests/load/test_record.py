from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qgpu.load.record import Record, Stop
from qgpu.load.workload import Workload

MS = 1_000_000


@given(st.lists(st.tuples(st.integers(0, 900 * MS), st.integers(1, 50))), st.integers(0, 500 * MS))
def test_what_finishes_before_the_start_does_not_count(finished, start_ns):
    record = Record(Workload(), start_ns, Stop())
    for at_ns, kernels in sorted(finished):
        record.done(at_ns, kernels)

    assert record.kernels == sum(kernels for at_ns, kernels in finished if at_ns >= start_ns)


@given(st.lists(st.tuples(st.integers(0, 900 * MS), st.integers(1, 50))), st.integers(1 * MS, 200 * MS))
def test_windows_add_up_to_all_kernels(finished, window_ns):
    record = Record(Workload(), 0, Stop(), window_ns)
    for at_ns, kernels in sorted(finished):
        record.done(at_ns, kernels)

    assert sum(kernels for _, kernels in record.report()["windows"]) == record.kernels


def test_a_record_is_over_at_its_duration_its_count_or_a_signal():
    stop = Stop()
    record = Record(Workload(duration_s=1.0, count=10), 100 * MS, stop)

    assert record.going(1099 * MS)
    assert not record.going(1100 * MS)

    record.done(500 * MS, 12)

    assert record.kernels == 10
    assert not record.going(501 * MS)

    stop.asked = True

    assert not Record(Workload(), 0, stop).going(0)


def test_rates_are_per_second_of_the_measured_part():
    record = Record(Workload(), 1000 * MS, Stop())
    record.done(1500 * MS, 100)
    record.going(3000 * MS)

    assert record.report()["kernels_per_s"] == 50
    assert record.report()["elapsed_s"] == 2


def test_a_watched_record_tells_of_each_second_apart():
    told = []
    record = Record(Workload(), 1000 * MS, Stop(), watch=lambda *what: told.append(what))
    for at_ms in range(500, 3500, 250):
        record.going(at_ms * MS)
        record.done(at_ms * MS, 1, [float(at_ms)])

    assert [(at, kernels, latency["max"]) for at, kernels, latency in told] == [(1.0, 4, 1750), (2.0, 4, 2750)]
