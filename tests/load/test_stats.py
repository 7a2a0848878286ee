from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qgpu.load.stats import percentile, summary

latencies = st.lists(st.floats(0, 1e9), min_size=1)


@given(latencies, st.floats(0.1, 100))
def test_a_percentile_covers_its_share_of_the_values(values, percent):
    found = percentile(sorted(values), percent)

    assert sum(value <= found for value in values) >= len(values) * percent / 100 - 1e-6
    assert sum(value < found for value in values) < max(1e-6, len(values) * percent / 100)


@given(latencies)
def test_a_summary_is_in_order_whatever_the_order_of_values(values):
    found = summary(values)

    assert found == summary(values[::-1])
    assert found["p50"] <= found["p90"] <= found["p99"] <= found["max"] == max(values)


def test_no_values_have_no_summary():
    assert summary([]) is None


def test_percentiles_of_a_hundred_values_are_what_one_reads_off():
    assert summary(range(1, 101)) == {"n": 100, "p50": 50, "p90": 90, "p99": 99, "max": 100}
