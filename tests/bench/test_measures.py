"""How measurements are read: on made-up runs of which the answer is known."""

from __future__ import annotations

import math

import pytest
from convergence import Change, took_s
from hypothesis import given
from hypothesis import strategies as st
from progress import Progress, Span, shares
from stability import stable_figures
from usage import Tick, errors_pp, seconds_of

MS = 1_000_000


def _progress(counts, started_s=100.0):
    return Progress({"started_ns": started_s * 1e9, "windows": [[n / 100, count] for n, count in enumerate(counts)]})


def test_a_change_is_over_when_shares_are_right_for_good():
    first = _progress([10] * 100 + [0] * 15 + [5] * 100)
    second = _progress([5] * 100 + [15] * 15 + [10] * 100)
    change = Change("quota", 101.0, 1 / 3, 102.1)

    # From 150 ms on every period is right; one that begins a little earlier is right within 5 points.
    assert 0.1 < took_s(first, second, change) <= 0.15


def test_change_that_never_settles_took_all_the_time():
    run = _progress([10] * 300)

    assert took_s(run, run, Change("quota", 101.0, 1 / 3, 102.5)) == 1.5


def test_shares_of_pods_that_stand_still_are_not_right():
    run = _progress([10] * 105 + [0] * 40 + [10] * 200)

    assert took_s(run, run, Change("quota", 101.0, 1 / 2, 102.5)) == pytest.approx(0.36, abs=0.02)


def test_a_share_that_was_right_before_the_change_took_no_time():
    run = _progress([10] * 300)

    assert took_s(run, run, Change("quota", 101.0, 1 / 2, 102.5)) == 0


@given(st.lists(st.integers(1, 95), min_size=2, max_size=6), st.integers(1, 50))
def test_pods_that_get_their_quotas_have_no_error(quotas, ticks):
    asked = {f"p{n}": cores for n, cores in enumerate(quotas)}
    history = [Tick(n * 100 * MS, {pod: n * cores * MS for pod, cores in asked.items()}) for n in range(ticks + 10)]

    assert max(errors_pp(history, asked, 1000 * MS), default=0) < 1e-9


def test_an_error_is_in_points_and_counts_for_every_pod():
    history = [Tick(n * 100 * MS, {"a": n * 60 * MS, "b": n * 40 * MS}) for n in range(12)]

    assert errors_pp(history, {"a": 50, "b": 50}, 1000 * MS) == pytest.approx([10.0] * 4)


def test_windows_that_late_ticks_made_longer_do_not_count():
    history = [Tick(at * MS, {"a": at * MS, "b": 0}) for at in (0, 500, 1030, 1520, 2100)]

    assert len(errors_pp(history, {"a": 50, "b": 50}, 1000 * MS)) == 0


@given(st.integers(1, 20), st.integers(1, 20))
def test_shares_are_parts_of_all_kernels(a, b):
    span = Span(100.0, 102.0, {})
    found = shares([_progress([a] * 300), _progress([b] * 300)], span)

    assert found == pytest.approx([a / (a + b), b / (a + b)])


def _batches_in_turns(batch_s, turn, phase, seconds=4.5, period_s=0.1):
    """Return what a pod that infers in its turn of every period says it finished, in windows of 10 ms."""
    counts, done_s = [0] * round(seconds * 100), phase * batch_s
    for period in range(int(seconds / period_s)):
        start_s, left_s = period * period_s + turn[0] * period_s, (turn[1] - turn[0]) * period_s
        at_s = start_s
        while left_s >= batch_s - done_s:
            at_s += batch_s - done_s
            left_s -= batch_s - done_s
            done_s = 0.0
            counts[int(at_s * 100)] += 1
        done_s += left_s
    return _progress(counts)


@given(st.floats(0.0155, 0.0162), st.floats(0, 0.99), st.floats(0, 0.99), st.floats(100.3, 101.3))
def test_three_seconds_of_largest_batches_give_1_percent_ratio(batch_s, phase, other, start_s):
    first = _batches_in_turns(batch_s, (0, 2 / 3), phase)
    second = _batches_in_turns(batch_s, (2 / 3, 1), other)
    span = Span(start_s, start_s + 3.0, {})

    assert first.rate(span) / second.rate(span) == pytest.approx(2.0, rel=0.01)


def test_minute_is_cut_into_seconds_aligned_to_ticks():
    ticks = [Tick(n * 100 * MS, {"a": n * 66 * MS, "b": n * 34 * MS}) for n in range(35)]
    found = list(seconds_of(ticks))

    assert [at_s for at_s, _ in found] == [1.0, 2.0, 3.0]
    assert found[0][1] == pytest.approx({"a": 0.66, "b": 0.34})


def test_a_swing_is_told_from_a_drift_and_from_a_constant():
    swinging = [2 / 3 + 0.01 * math.sin(2 * math.pi * second / 6) for second in range(60)]
    creeping = [2 / 3 + 0.0001 * second for second in range(60)]
    told, crept, still = (
        {figure.name: figure.value for figure in stable_figures("x", shares, "")}
        for shares in (swinging, creeping, [0.5] * 60)
    )

    assert told["stable_swing_pp"] == pytest.approx(1.0, rel=0.01)
    assert told["stable_worst_pp"] < 1.01
    assert crept["stable_drift_pp_per_min"] == pytest.approx(0.6)
    assert still["stable_swing_pp"] == pytest.approx(0.0, abs=1e-9)
    assert still["stable_worst_pp"] == pytest.approx(100 / 6)
