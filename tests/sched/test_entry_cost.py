"""What GPFIFO entries show of pods' work."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.model import NS_PER_MS, Sharing
from qgpu.sched.entry_cost import alike, by_entries
from qgpu.sched.trial import Trial

WHOLE_NS = 100 * NS_PER_MS
SLICES, GATES = Sharing(round_ns=4_000_000), Sharing(by_gate=True)


def trial(
    sharing: Sharing, rate: float, bounds: tuple[float, float], entries: int | None, whole_ns: int = WHOLE_NS
) -> Trial:
    """Make a trial of pod a: what records say, what they allow, and how many entries the card took from it."""
    return Trial(
        sharing,
        {"a": rate},
        {"a": 1e6},
        watched_ns=whole_ns,
        bounds={"a": bounds},
        entries={} if entries is None else {"a": entries},
        by_records={"a": rate},
    )


def rates(*trials: Trial) -> list[float]:
    """Return pod a's work in each trial, by its entries."""
    return [each.rates["a"] for each in by_entries(trials)]


def test_the_trial_with_long_turns_tells_what_an_entry_costs() -> None:
    # Each entry costs 0.1 ms. In turns by gate the records only show that the pod idled for up to a half of its time.
    assert rates(trial(SLICES, 0.5, (0.49, 0.51), 500), trial(GATES, 0.6, (0.3, 0.6), 400)) == [
        pytest.approx(0.5, abs=0.002),
        pytest.approx(0.4, abs=0.002),
    ]


def test_rates_stay_within_what_records_allow() -> None:
    assert rates(trial(SLICES, 0.5, (0.49, 0.51), 500), trial(GATES, 0.3, (0.25, 0.48), 495)) == [
        pytest.approx(0.49, abs=0.02),
        pytest.approx(0.48),
    ]


def test_records_decide_if_no_cost_fits_all_trials() -> None:
    # A pod that claims ten times the entries in one trial, or a program that has changed its phase.
    assert rates(trial(SLICES, 0.5, (0.49, 0.51), 500), trial(GATES, 0.4, (0.35, 0.45), 5000)) == [0.5, 0.4]


@pytest.mark.parametrize("entries", [None, 0])
def test_records_decide_without_entries(entries: int | None) -> None:
    assert rates(trial(SLICES, 0.5, (0.49, 0.51), entries), trial(GATES, 0.6, (0.3, 0.6), entries)) == [0.5, 0.6]


def test_a_few_entries_count_with_one_more_or_less() -> None:
    # Six steps of 7.5 ms in 0.3 s, then two in 0.2 s: half as many, or three quarters.
    found = rates(
        trial(SLICES, 0.15, (0.149, 0.151), 6, 300 * NS_PER_MS), trial(GATES, 0.17, (0.05, 0.2), 2, 200 * NS_PER_MS)
    )

    assert found == [pytest.approx(0.15), pytest.approx(0.1125)]


def test_only_rates_of_many_entries_are_certain() -> None:
    found = by_entries([trial(SLICES, 0.5, (0.49, 0.51), 500), trial(GATES, 0.008, (0.0, 0.1), 8)])

    assert [each.counted for each in found] == [{"a"}, set()]


def test_a_later_trial_can_take_back_what_entries_showed() -> None:
    first = by_entries([trial(SLICES, 0.5, (0.49, 0.51), 500), trial(GATES, 0.6, (0.3, 0.6), 400)])
    again = by_entries([*first, trial(Sharing(), 0.5, (0.49, 0.51), 9000)])

    assert [each.rates["a"] for each in again] == [0.5, 0.6, 0.5]


def test_rates_compare_by_records_where_one_has_no_entries() -> None:
    slices, before = by_entries([trial(SLICES, 0.5, (0.49, 0.51), 500), trial(GATES, 0.6, (0.0, 0.6), 400)])
    now = trial(GATES, 0.6, (0.0, 0.6), None)

    assert (before.rates["a"], alike(before, now).rates["a"], alike(now, before).rates["a"]) == (
        pytest.approx(0.4, abs=0.002),
        0.6,
        0.6,
    )
    assert alike(before, slices).rates == before.rates


def interval() -> st.SearchStrategy[tuple[float, float, float]]:
    """Draw the least, the likely and the most work of a pod."""
    return st.lists(st.floats(0, 1), min_size=3, max_size=3).map(lambda parts: tuple(sorted(parts)))  # type: ignore[arg-type,return-value]


@given(st.lists(st.tuples(interval(), st.integers(0, 10**7), st.integers(1, 10**10)), min_size=1, max_size=8))
def test_no_count_moves_a_rate_out_of_its_bounds(
    told: list[tuple[tuple[float, float, float], int, int]],
) -> None:
    trials = [trial(SLICES, rate, (least, most), count, whole) for (least, rate, most), count, whole in told]

    for each, found in zip(trials, by_entries(trials), strict=True):
        least, most = each.bounds["a"]
        assert least <= found.rates["a"] <= most


def exact(cost: float, worked: Mapping[Sharing, float]) -> list[Trial]:
    """Make trials whose records are exact, with the entries that such work takes at a cost in ns."""
    return [trial(way, rate, (rate, rate), round(rate * WHOLE_NS / cost)) for way, rate in worked.items()]


@given(st.floats(1e3, 1e6), st.floats(0.1, 1), st.floats(0.1, 1))
def test_exact_records_are_never_changed(cost: float, one: float, other: float) -> None:
    assert rates(*exact(cost, {SLICES: one, GATES: other})) == [pytest.approx(one), pytest.approx(other)]
