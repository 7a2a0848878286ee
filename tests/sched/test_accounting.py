"""What a round settles: debts against what a plan aimed at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.model import NS_PER_MS, Grant, OnIdle, PodClass, PodPlan, Window
from qgpu.sched.accounting import CREDIT_NS, DEBT_HORIZON_NS, QUOTA_CREDIT_NS, settle
from qgpu.sched.gpu_usage import GpuUse, RoundEntry

MS = NS_PER_MS
PERIOD = 100 * MS


def by_window(
    length_ms: int, run_ms: float, *, open_ms: int | None = None, weight: int = 1, debt_ms: float = 0
) -> RoundEntry:
    """Report a pod that has a window of this length."""
    part = PodPlan("any", PodClass.OFFLINE, 50_000, (Window(0, length_ms * MS, OnIdle.YIELD),), weight)
    use = GpuUse(round(run_ms * MS), 1, (length_ms if open_ms is None else open_ms) * MS)
    return RoundEntry(Grant(), part, use, round(debt_ms * MS), 1)


def by_slice(run_ms: float, *, weight: int = 1, debt_ms: float = 0) -> RoundEntry:
    """Report a pod that shares by timeslices."""
    part = PodPlan("any", PodClass.OFFLINE, 50_000, weight=weight)
    return RoundEntry(Grant(), part, GpuUse(round(run_ms * MS), 1, PERIOD), round(debt_ms * MS), 1)


def by_quota(run_ms: float, *, debt_ms: float = 0, cores: int = 50) -> RoundEntry:
    """Report a pod of Fixed Share."""
    part = PodPlan("any", PodClass.OFFLINE, 50_000, (Window(0, cores * MS),))
    use = GpuUse(round(run_ms * MS), 1, cores * MS, PERIOD)
    return RoundEntry(Grant(cores=cores), part, use, round(debt_ms * MS), 1)


def debts(**entries: RoundEntry) -> dict[str, float]:
    """Settle one round and return debts in ms."""
    return {name: debt_ns / MS for name, debt_ns in settle(entries, PERIOD, PERIOD).items()}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (by_window(50, 49), by_window(50, 49), {"a": 0, "b": 0}),
        (by_window(50, 51), by_window(50, 47), {"a": 2, "b": -2}),
        (by_window(67, 65, weight=2), by_window(33, 31), {"a": 1, "b": -1}),
        # What is owed stays owed until it is paid, but not beyond what gates can cost.
        (by_window(50, 51, debt_ms=3), by_window(50, 47, debt_ms=-3), {"a": 5, "b": -5}),
        (by_window(50, 55, debt_ms=5), by_window(50, 44, debt_ms=-5), {"a": 6, "b": -6}),
        # Who had nothing to run in its own turn is owed nothing, and nobody owes for what was lent.
        (by_window(50, 49), by_window(50, 20), {"a": 0, "b": 0}),
        (by_window(50, 75, open_ms=100), by_window(50, 20), {"a": 0, "b": 0}),
    ],
)
def test_windows_are_held_to_weights_of_what_was_used(a: RoundEntry, b: RoundEntry, expected: dict[str, float]) -> None:
    assert expected == debts(a=a, b=b)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (by_quota(52), 2),
        (by_quota(49), -1),
        (by_quota(49, debt_ms=10), 9),
        (by_quota(20), 0),
        (by_quota(20, debt_ms=10), 0),
        (by_quota(20, debt_ms=-2), -2),
        (by_quota(49, debt_ms=-12), -12),
    ],
)
def test_quotas_follow_wall_clock_and_unused_time_expires(entry: RoundEntry, expected: float) -> None:
    assert debts(a=entry)["a"] == expected


def test_a_pod_that_online_work_kept_off_the_card_is_no_idle_pod() -> None:
    online = RoundEntry(Grant(PodClass.ONLINE), None, GpuUse(40 * MS, 100, PERIOD), 0, 1)

    assert debts(a=by_window(50, 31), b=by_window(50, 27), service=online)["b"] == -2


def test_a_ragged_round_settles_nothing_among_pods() -> None:
    entries = {"a": by_window(50, 60), "b": by_window(50, 30)}

    assert settle(entries, PERIOD // 2, PERIOD, ragged=True) == {"a": 0, "b": 0}


def test_a_ragged_round_leaves_debts_by_window_as_they_were() -> None:
    entries = {"a": by_window(50, 60, debt_ms=2), "b": by_window(50, 30, debt_ms=-2)}

    assert settle(entries, PERIOD // 2, PERIOD, ragged=True) == {"a": 2 * MS, "b": -2 * MS}


def test_a_ragged_round_is_held_against_quotas_all_the_same() -> None:
    assert settle({"a": by_quota(52)}, PERIOD, PERIOD, ragged=True) == {"a": 2 * MS}


def test_timeslices_leave_no_debts_and_end_those_of_windows() -> None:
    assert debts(a=by_slice(70), b=by_slice(20, debt_ms=-5)) == {"a": 0, "b": 0}


def test_a_pod_that_rests_owes_nothing_by_weight() -> None:
    resting = by_window(50, 0, debt_ms=5)._replace(busy_tsgs=0)

    assert debts(a=resting, b=by_window(50, 49, debt_ms=-3)) == {"a": 0, "b": -3}


def test_a_satisfied_pod_without_a_window_owes_nothing() -> None:
    assert debts(a=by_window(50, 35), b=by_window(50, 31), s=by_slice(30)) == {"a": 2, "b": -2, "s": 0}


def test_a_pod_held_to_its_quota_is_owed_nothing_while_it_starts() -> None:
    assert debts(a=by_quota(49), b=by_quota(49)._replace(starting=True)) == {"a": -1, "b": 0}


@pytest.mark.parametrize(("taken_ms", "expected"), [(10, -10), (0, 0)])
def test_a_pod_is_owed_what_starts_took_of_its_windows(taken_ms: int, expected: float) -> None:
    starter = by_quota(taken_ms, cores=10)
    starter = starter._replace(use=starter.use._replace(ungated_ns=taken_ms * MS))

    assert debts(a=by_quota(40), b=starter)["a"] == expected


def test_what_a_starting_pod_took_stays_owed_after_its_start() -> None:
    starting = by_quota(100, cores=1)._replace(starting=True)
    owed = debts(a=starting)["a"]

    assert owed == 30  # what 1 % gives in STARTING_HORIZON_NS
    assert debts(a=by_quota(1, cores=1, debt_ms=owed)) == {"a": owed}
    assert debts(a=by_quota(100, cores=1)) == {"a": 2}  # and no other pod


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), min_size=1, max_size=30))
def test_debt_is_bounded_whatever_happens(runs: list[tuple[int, int]]) -> None:
    debt = {"a": 0.0, "b": 0.0, "fixed": 0.0}
    for a, b in runs:
        debt = debts(
            a=by_window(70, a, debt_ms=debt["a"], weight=7),
            b=by_window(30, b, debt_ms=debt["b"], weight=3),
            fixed=by_quota(a, debt_ms=debt["fixed"]),
        )

        assert max(abs(debt["a"]), abs(debt["b"])) <= CREDIT_NS / MS
        assert -QUOTA_CREDIT_NS / MS <= debt["fixed"] <= DEBT_HORIZON_NS / MS / 2
