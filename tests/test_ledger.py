"""The ledger: samples folded into GPU time, debt and who was busy of late."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from qgpu.model import NS_PER_MS, Grant, Pace, Plan, PodClass, PodPlan, PodSample, Sample, TsgSample, Window
from qgpu.sched.ledger import FORGET_AFTER_NS, IDLE_AFTER_NS, Ledger
from qgpu.sched.settle import DEBT_HORIZON_NS
from qgpu.sched.standing import Standing

STEP = 100 * NS_PER_MS


def sample(now_ns: int, run_ns: int, *, cores: int | None = 50, gated_ns: int = 0) -> Sample:
    """Report one pod of one TSG."""
    return Sample(0, now_ns, (PodSample("a", Grant(cores=cores), (TsgSample("a/0", run_ns),), gated_ns),))


def fold(*samples: Sample) -> Ledger:
    """Fold samples into a new ledger."""
    ledger = Ledger(0)
    for each in samples:
        ledger = ledger.advance(each)
    return ledger


def busy(ledger: Ledger) -> bool:
    """Tell whether the ledger holds pod a for busy."""
    return ledger.snapshot(STEP).pods[0].busy


@given(st.lists(st.integers(0, STEP), min_size=1, max_size=20))
def test_used_time_is_the_sum_of_what_was_measured(runs: list[int]) -> None:
    ledger = fold(*(sample(STEP * n, run) for n, run in enumerate(runs)))

    assert sum(runs) == ledger.accounts["a"].used_ns


@given(st.lists(st.tuples(st.integers(0, 2 * STEP), st.integers(0, 10 * STEP)), max_size=30))
def test_debt_is_bounded_by_a_second_of_the_quota(steps: list[tuple[int, int]]) -> None:
    now, ledger = 0, Ledger(0)
    for run, elapsed in steps:
        now += elapsed
        ledger = ledger.advance(sample(now, run))

        assert abs(ledger.accounts["a"].debt_ns) <= DEBT_HORIZON_NS // 2


def test_debt_is_time_beyond_the_quota() -> None:
    ledger = fold(sample(0, 0), sample(STEP, 70 * NS_PER_MS))

    assert ledger.accounts["a"].debt_ns == 20 * NS_PER_MS


def test_a_pod_without_quota_owes_nothing() -> None:
    assert fold(sample(0, 0, cores=None), sample(STEP, STEP, cores=None)).accounts["a"].debt_ns == 0


def test_a_pod_is_idle_only_after_an_open_gate_found_nothing_to_run() -> None:
    ran = fold(sample(0, 1))

    assert busy(ran)
    assert busy(ran.advance(sample(IDLE_AFTER_NS - 1, 0)))
    assert not busy(ran.advance(sample(IDLE_AFTER_NS, 0)))


def test_time_behind_a_closed_gate_is_no_idleness() -> None:
    closed_for_long = sample(10 * IDLE_AFTER_NS, 0, gated_ns=10 * IDLE_AFTER_NS)

    assert busy(fold(sample(0, 1), closed_for_long))


def test_a_pod_that_is_gone_is_forgotten() -> None:
    assert fold(sample(0, 1), Sample(0, STEP)).accounts == {}


def test_a_clock_that_stands_still_or_jumps_back_counts_as_no_time() -> None:
    assert fold(sample(STEP, 0), sample(0, STEP // 2)).accounts["a"].debt_ns == STEP // 2


def planned(ledger: Ledger, *pods: str, period_ns: int = STEP) -> Ledger:
    """Give pods windows one after the other."""
    length = period_ns // len(pods)
    parts = tuple(
        PodPlan(name, PodClass.OFFLINE, 1000, (Window(i * length, (i + 1) * length),), weight=1)
        for i, name in enumerate(pods)
    )
    return ledger.planned(Plan(0, period_ns, parts))


def pair(now_ns: int, a_ns: int, b_ns: int, elapsed_ns: int = STEP) -> Sample:
    """Report two pods that had half of the time each."""
    pods = (("a", a_ns), ("b", b_ns))
    return Sample(
        0, now_ns, tuple(PodSample(name, Grant(), (TsgSample(name, run),), elapsed_ns // 2) for name, run in pods)
    )


def debts(ledger: Ledger) -> dict[str, int]:
    """Return debts in ms."""
    return {name: account.debt_ns // NS_PER_MS for name, account in ledger.accounts.items()}


def test_rounds_are_whole_periods_of_the_plan_in_force() -> None:
    ledger = planned(fold(pair(0, 1, 1), pair(2 * STEP, 1, 1)), "a", "b", period_ns=2 * STEP)

    in_midst = ledger.advance(pair(3 * STEP, STEP, 0))
    assert debts(in_midst) == {"a": 0, "b": 0}
    assert debts(in_midst.advance(pair(4 * STEP, 0, STEP - 4 * NS_PER_MS))) == {"a": 2, "b": -2}


def test_a_round_that_began_in_the_midst_of_a_period_is_passed_over() -> None:
    ledger = planned(fold(pair(0, 1, 1), pair(STEP // 2, 1, 1)), "a", "b")
    ragged = ledger.advance(pair(STEP, 0, STEP // 2, STEP // 2))

    assert debts(ragged) == {"a": 0, "b": 0}
    assert debts(ragged.advance(pair(2 * STEP, STEP // 2, STEP // 2 - 4 * NS_PER_MS))) == {"a": 2, "b": -2}


def test_debt_among_pods_ends_with_the_terms_it_was_made_under() -> None:
    ledger = planned(fold(pair(0, 1, 1), pair(STEP, 1, 1)), "a", "b")
    owing = planned(ledger.advance(pair(2 * STEP, STEP // 2, STEP // 2 - 4 * NS_PER_MS)), "a", "b")

    assert debts(owing) == {"a": 2, "b": -2}
    assert debts(planned(owing, "a", "b", period_ns=2 * STEP)) == {"a": 0, "b": 0}


def sliced(ledger: Ledger, *slices_us: int, period_ns: int = STEP) -> Ledger:
    """Give pods timeslices, and equal weights."""
    parts = tuple(PodPlan(name, PodClass.OFFLINE, us, weight=1) for name, us in zip("ab", slices_us, strict=True))
    return ledger.planned(Plan(0, period_ns, parts))


def test_other_timeslices_begin_a_new_account_and_their_first_round_is_passed_over() -> None:
    """A round begins with slices as they were; how they were used says nothing of others."""
    more, less = STEP // 2 + 4 * NS_PER_MS, STEP // 2 - 4 * NS_PER_MS
    ledger = sliced(fold(pair(0, 1, 1), pair(STEP, 1, 1)), 2000, 2000)
    for at in (2, 3, 4):
        ledger = sliced(ledger.advance(pair(at * STEP, more, less)), 2000, 2000)
    changed = sliced(ledger, 20_000, 20_000)
    passed_over = changed.advance(pair(5 * STEP, more, less))
    counted = passed_over
    for at in (6, 7, 8):
        counted = counted.advance(pair(at * STEP, more, less))

    assert debts(ledger)["a"] > 0 > debts(ledger)["b"]
    assert debts(changed) == debts(passed_over) == {"a": 0, "b": 0}
    assert debts(counted)["a"] > 0 > debts(counted)["b"]


def test_what_was_learnt_of_a_pod_is_forgotten_once_it_has_rested_for_long() -> None:
    ledger = fold(sample(0, 1))
    account = ledger.accounts["a"]
    learnt = replace(ledger, accounts={"a": account._replace(standing=Standing(pace=Pace.GAPPY))})

    assert learnt.advance(sample(FORGET_AFTER_NS - 1, 0)).snapshot(STEP).pods[0].pace is Pace.GAPPY
    assert learnt.advance(sample(FORGET_AFTER_NS, 0)).snapshot(STEP).pods[0].pace is Pace.STEADY
