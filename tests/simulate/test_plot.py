"""The picture of a scenario: lines that can be read, also where pods take long turns."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.errors import ConfigError
from qgpu.simulate.plot import check, means, readable_span_s
from qgpu.simulate.report import Moment


def turns(length_s: float, duration_s: float = 60.0) -> list[Moment]:
    """Two pods have the card in turn."""
    count = round(duration_s / length_s)
    return [Moment((n + 1) * length_s, {"a": float(n % 2 == 0), "b": float(n % 2 == 1)}, {}) for n in range(count)]


def test_steady_shares_are_drawn_as_they_are() -> None:
    assert readable_span_s([Moment(n / 10, {"a": 0.6, "b": 0.3}, {}) for n in range(1, 600)], 60) == 0


def test_turns_by_gate_are_drawn_as_means() -> None:
    moments = turns(0.25)
    span_s = readable_span_s(moments, 60)
    line = means(moments, "a", span_s)

    assert span_s >= 0.5
    assert max(line[10:-10]) - min(line[10:-10]) < 0.3


def test_a_span_is_at_most_a_quarter_of_the_scenario() -> None:
    assert readable_span_s(turns(1.0, 4.0), 4) <= 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.floats(0.1, 10))
def test_a_mean_lies_within_the_shares_that_it_is_of(shares: list[float], span_s: float) -> None:
    moments = [Moment(n + 1, {"a": share}, {}) for n, share in enumerate(shares)]

    assert all(min(shares) - 1e-9 <= mean <= max(shares) + 1e-9 for mean in means(moments, "a", span_s))


def test_a_mean_over_everything_is_the_share_of_everything() -> None:
    assert means(turns(0.5, 10.0), "a", 100.0)[10] == pytest.approx(0.5)


def test_only_files_of_known_formats_can_be_plots() -> None:
    check(Path("shares.SVG"))
    check(Path("shares"))
    with pytest.raises(ConfigError, match=r"x\.foo: no format of plots; end its name in one of .*svg"):
        check(Path("x.foo"))
