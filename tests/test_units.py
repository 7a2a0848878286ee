"""Sizes and times as people write them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu import units
from qgpu.errors import InvalidValueError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("512MiB", 512 << 20),
        ("16g", 16 << 30),
        ("1.5 GiB", 3 << 29),
        ("2gb", 2 << 30),
        ("2GB", 2 << 30),
        ("1TiB", 1 << 40),
        ("2PiB", 1 << 51),
    ],
)
def test_sizes_are_read_in_powers_of_1024(text: str, expected: int) -> None:
    assert units.parse_memory(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("100ms", 10**8), ("1s", 10**9), ("50us", 50_000), ("50µs", 50_000), ("20ns", 20)]
)
def test_times_are_read_as_nanoseconds(text: str, expected: int) -> None:
    assert units.parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "ms", "-1s", "1 h", "1e3s", "100", "nan"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidValueError, match="is not a time"):
        units.parse_duration(text)


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "1 Gbit", "1,5G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidValueError, match="is not a size"):
        units.parse_memory(text)


@pytest.mark.parametrize(("text", "suggested"), [("16Gb", "16GB"), ("16 Gib ", "16 GiB")])
def test_a_size_in_bits_is_refused(text: str, suggested: str) -> None:
    with pytest.raises(InvalidValueError, match=f"is in bits; write bytes, such as {suggested}$"):
        units.parse_memory(text)


def test_a_size_is_written_without_an_exponent() -> None:
    assert units.format_memory(999_999_999 << 30) == "953.7 PiB"


def test_per_cent_and_factors_are_read_as_they_are_written() -> None:
    assert [units.format_percent(30), *map(units.format_factor, (1, 1.5))] == ["30 %", "none", "1.5 times"]
    assert [*map(units.format_count, (0, 1, 2))] == ["0 times", "once", "2 times"]
    assert units.parse_percent(units.format_percent(30)) == 30


@given(st.integers(0, 1 << 62))
def test_a_size_survives_being_written_and_read(size: int) -> None:
    assert units.parse_memory(units.format_memory(size)) == pytest.approx(size, rel=0.01)


@given(st.integers(0, 10**12))
def test_a_time_survives_being_written_and_read(duration_ns: int) -> None:
    assert units.parse_duration(units.format_duration(duration_ns)) == pytest.approx(duration_ns, rel=0.01)


@pytest.mark.parametrize(
    ("text", "suggested"),
    [("16", "such as 16GiB"), ("80", "80GiB"), ("0", "16GiB"), ("5MiB", "16GiB"), ("1024", "16G")],
)
def test_a_limit_without_unit_is_refused_and_one_suggested(text: str, suggested: str) -> None:
    with pytest.raises(InvalidValueError, match=suggested):
        units.parse_memory_limit(text)


def test_the_least_limit_is_taken() -> None:
    assert units.parse_memory_limit("32MiB") == units.LEAST_LIMIT
    assert units.check_memory_limit(units.LEAST_LIMIT) == units.LEAST_LIMIT


@pytest.mark.parametrize("refuse", [lambda: units.parse_memory_limit("16"), lambda: units.check_memory_limit(16)])
def test_a_limit_below_any_context_is_called_so(refuse: Callable[[], int]) -> None:
    with pytest.raises(InvalidValueError, match=r"16 B.* less than any CUDA context .* least limit is 32 MiB"):
        refuse()
