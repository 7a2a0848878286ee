"""When a part of each period is reserved for pods that are owed work, and how much."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.model import Grant, PodClass, PodPlan, Sharing
from qgpu.sched import reservation
from qgpu.sched.gpu_usage import GpuUse, RoundEntry
from qgpu.sched.slice_tuner import begin
from qgpu.sched.trial import Trial
from qgpu.sched.tuning import Tuning

ROUND = Sharing(round_ns=4_000_000)


def entries(**cores: int | None) -> dict[str, RoundEntry]:
    """Make busy pods with these quotas in per cent; one without a quota weighs 10."""
    return {
        name: RoundEntry(Grant(cores=quota), PodPlan(name, PodClass.OFFLINE, 2000, weight=quota or 10), GpuUse(), 0, 1)
        for name, quota in cores.items()
    }


def by_slices(resting: Collection[str] = (), **rates: float) -> Trial:
    """Make a trial of slices."""
    starts = dict.fromkeys(rates, 100)
    return Trial(ROUND, rates, dict.fromkeys(rates, 1e6), starts, resting=frozenset(resting), watched_ns=10**9)


def reserved(part: float, owners: Collection[str], use: float, **rates: float) -> Trial:
    """Make a trial with a part of the period reserved, of which its owners used so much."""
    sharing = Sharing(ROUND.round_ns, by_gate=True, ungated=frozenset(owners), reserved=part)
    return Trial(sharing, rates, dict.fromkeys(rates, 1e6), reserved_use=use)


def tuning(*trials: Trial, satisfied: Collection[str] = ()) -> Tuning:
    """Make what is known of two pods or more."""
    return begin([1, 1])._replace(trials=trials, satisfied=frozenset(satisfied))


@pytest.mark.parametrize(
    ("best", "quotas", "owners", "part"),
    [
        (by_slices(a=0.05, b=0.75), {"a": 50, "b": 20}, {"a"}, 0.47),
        (by_slices(a=0.05, b=0.75), {"a": 50, "b": 50}, {"a"}, 0.34),  # b keeps its due
        (by_slices(a=0.05, b=0.75), {"a": 50, "b": None}, {"a"}, 0.47),
        (by_slices(a=0.05, b=0.05, c=0.75), {"a": 20, "b": 20, "c": 10}, {"a", "b"}, 0.32),
        (by_slices(resting="b", a=0.05, b=0.05, c=0.75), {"a": 20, "b": 20, "c": 10}, {"a", "b"}, 0.16),
    ],
)
def test_pods_owed_work_get_a_part_of_the_period(
    best: Trial, quotas: dict[str, int | None], owners: set[str], part: float
) -> None:
    wanted = reservation.worth_a_trial(tuning(best), best, entries(**quotas))

    assert wanted == Sharing(ROUND.round_ns, by_gate=True, ungated=frozenset(owners), reserved=part)


@pytest.mark.parametrize(
    ("best", "satisfied"),
    [
        (by_slices(a=0.45, b=0.4), ""),
        (by_slices(a=0.05, b=0.75), "a"),
        (by_slices(resting="a", a=0.05, b=0.75), ""),
        (by_slices(a=0.1, b=0.1), ""),
        (by_slices(resting="b", a=0.1, b=0.8), ""),
    ],
)
def test_nothing_is_reserved_where_nobody_waits_or_can_give(best: Trial, satisfied: str) -> None:
    assert reservation.worth_a_trial(tuning(best, satisfied=satisfied), best, entries(a=50, b=50)) is None


@pytest.mark.parametrize(
    ("trial", "expected"),
    [
        (reserved(0.47, "a", 1.0, a=0.5, b=0.4), True),
        (reserved(0.47, "a", 0.3, a=0.17, b=0.4), True),  # it waits between its steps, at full speed
        (reserved(0.47, "a", 0.3, a=0.055, b=0.4), False),  # hardly faster
        (reserved(0.47, "a", 0.05, a=0.08, b=0.4), False),  # hardly used
        (reserved(0.47, "a", 1.0, a=0.2, b=0.2), False),  # both together are slower
    ],
)
def test_reserved_time_stays_if_it_makes_its_owner_faster(trial: Trial, expected: bool) -> None:
    best = by_slices(a=0.05, b=0.75)

    assert reservation.pays(trial, best, tuning(best, trial), entries(a=50, b=20)) == expected


def test_more_is_reserved_while_the_owner_has_less_than_its_due() -> None:
    best, pods = by_slices(a=0.05, b=0.75), entries(a=50, b=10)
    slow, fast = reserved(0.3, "a", 0.7, a=0.25, b=0.5), reserved(0.47, "a", 1.0, a=0.49, b=0.4)
    more = reservation.more(tuning(best, slow), slow, best, pods)

    assert more is not None
    assert 0.3 < more.reserved <= 50 / 60
    assert reservation.more(tuning(best, fast), fast, best, pods) is None


@given(
    a=st.floats(0, 0.9), b=st.floats(0, 0.9), quota=st.integers(1, 94), other=st.one_of(st.none(), st.integers(1, 5))
)
def test_owners_get_no_more_than_their_part_of_the_period(a: float, b: float, quota: int, other: int | None) -> None:
    best, pods = by_slices(a=a, b=b), entries(a=quota, b=other)
    wanted = reservation.worth_a_trial(tuning(best), best, pods)

    if wanted is not None:
        weights = {name: entry.weight for name, entry in pods.items()}
        part = sum(weights[name] for name in wanted.ungated) / sum(weights.values())
        assert 0.1 <= wanted.reserved <= min(0.9, part) + 0.005
