from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qgpu.load.processes import added

MS = 1_000_000


def _result(started_ms, counts):
    return {
        "device": "card",
        "started_ns": started_ms * MS,
        "ended_ns": (started_ms + 10 * len(counts)) * MS,
        "kernels": sum(counts),
        "latency_us": None,
        "windows": [[n / 100, count] for n, count in enumerate(counts)],
        "startup_s": 0.5,
    }


results = st.lists(
    st.builds(_result, st.integers(1, 1000), st.lists(st.integers(0, 50), min_size=1, max_size=20)), min_size=1
)


@given(results)
def test_no_kernel_is_lost_when_processes_are_added_up(results):
    found = added(results)

    assert found["kernels"] == sum(result["kernels"] for result in results)
    assert sum(count for _, count in found["windows"]) == found["kernels"]


@given(results)
def test_the_order_of_processes_does_not_matter(results):
    assert added(results)["windows"] == added(results[::-1])["windows"]


def test_processes_are_counted_on_one_clock():
    found = added([_result(100, [1, 1]), _result(120, [2, 2])])

    assert [count for _, count in found["windows"]] == [1, 1, 2, 2]


def test_the_latency_of_several_is_the_worst():
    latencies = [{"p99": 5.0, "n": 10}, None, {"p99": 7.0, "n": 9}]
    found = added([{**_result(1, [1]), "latency_us": latency} for latency in latencies])

    assert found["latency_us"] == {"p99": 7.0, "n": 9}
