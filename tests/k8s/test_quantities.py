"""Quantities are read exactly, and written so that they are read back."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.errors import InvalidValueError
from qgpu.k8s import quantities


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("20Gi", 20 * 1024**3),
        ("1500M", 1_500_000_000),
        ("1e9", 1_000_000_000),
        ("966367641600m", Decimal("966367641.6")),
        ("0.5Gi", 512 * 1024**2),
        ("3k", 3000),
        ("144384Mi", 141 * 1024**3),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_quantity_is_read_exactly(text: str, value: Decimal | int) -> None:
    assert quantities.parse(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "1.5.5", "-", "12 Gi", "1Gib", "nan"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(InvalidValueError, match="not a quantity"):
        quantities.parse(text)


@pytest.mark.parametrize("text", ["1500m", "-1", "0.3"])
def test_part_of_a_byte_or_less_than_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidValueError, match="not a whole number"):
        quantities.whole(text)


@given(st.integers(0, 2**60))
def test_bytes_that_are_written_are_read_back(size: int) -> None:
    assert quantities.whole(quantities.from_bytes(size)) == size
