"""Slices and added latency: one table, read in both directions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qgpu.model import MAX_TIMESLICE_US, MIN_TIMESLICE_US, NS_PER_US
from qgpu.model.hardware_traits import H200
from qgpu.policies.latency_targets import IN_PHASE_US, added_ns, slice_us

SLICES = st.integers(MIN_TIMESLICE_US, min(MAX_TIMESLICE_US, 20_000))


@given(SLICES, SLICES)
def test_a_longer_slice_never_adds_less(one: int, other: int) -> None:
    low, high = sorted((one, other))

    assert 0 <= added_ns(low, H200) <= added_ns(high, H200)


@given(st.integers(50, 20_000), st.integers(1, 4))
def test_the_slice_of_a_target_adds_what_the_target_allows(slice_: int, waits: int) -> None:
    target_ns = added_ns(slice_, H200) * waits + IN_PHASE_US * NS_PER_US

    assert abs(slice_us(target_ns, waits, H200) - slice_) <= 1


def test_measured_slices_add_what_was_measured() -> None:
    for slice_, p99_us in H200.p99_us:
        assert added_ns(slice_, H200) == (p99_us - H200.alone_p99_us) * NS_PER_US
