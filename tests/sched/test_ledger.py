"""The ledger: samples folded into GPU time, debt and who was busy of late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.model import (
    NS_PER_MS,
    Grant,
    Plan,
    PodClass,
    PodPlan,
    PodSample,
    Sample,
    Sharing,
    TsgSample,
    Window,
)
from qgpu.model.hardware_traits import OTHER
from qgpu.sched.accounting import STARTING_HORIZON_NS
from qgpu.sched.ledger import IDLE_AFTER_NS, Ledger
from qgpu.sched.slice_tuner import Tuning

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
def test_debt_is_bounded_by_three_seconds_of_the_quota(steps: list[tuple[int, int]]) -> None:
    now, ledger = 0, Ledger(0)
    for run, elapsed in steps:
        now += elapsed
        ledger = ledger.advance(sample(now, run))

        assert abs(ledger.accounts["a"].debt_ns) <= STARTING_HORIZON_NS // 2


def test_debt_is_time_beyond_the_quota() -> None:
    ledger = fold(sample(0, 0), sample(STEP, 70 * NS_PER_MS))

    assert ledger.accounts["a"].debt_ns == 20 * NS_PER_MS


def test_a_pod_without_quota_owes_nothing() -> None:
    assert fold(sample(0, 0, cores=None), sample(STEP, STEP, cores=None)).accounts["a"].debt_ns == 0


def test_pod_is_idle_only_after_open_gate_with_nothing_to_run() -> None:
    ran = fold(sample(0, 1))

    assert busy(ran)
    assert busy(ran.advance(sample(IDLE_AFTER_NS - 1, 0)))
    assert not busy(ran.advance(sample(IDLE_AFTER_NS, 0)))


def test_time_behind_a_closed_gate_is_no_idleness() -> None:
    closed_for_long = sample(10 * IDLE_AFTER_NS, 0, gated_ns=10 * IDLE_AFTER_NS)

    assert busy(fold(sample(0, 1), closed_for_long))


def test_a_pod_that_is_gone_is_forgotten() -> None:
    assert fold(sample(0, 1), Sample(0, STEP)).accounts == {}


def test_clock_that_stalls_or_steps_back_adds_no_time() -> None:
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


def test_round_started_mid_period_is_skipped() -> None:
    ledger = planned(fold(pair(0, 1, 1), pair(STEP // 2, 1, 1)), "a", "b")
    ragged = ledger.advance(pair(STEP, 0, STEP // 2, STEP // 2))

    assert debts(ragged) == {"a": 0, "b": 0}
    assert debts(ragged.advance(pair(2 * STEP, STEP // 2, STEP // 2 - 4 * NS_PER_MS))) == {"a": 2, "b": -2}


def test_debt_among_pods_ends_with_the_terms_it_was_made_under() -> None:
    ledger = planned(fold(pair(0, 1, 1), pair(STEP, 1, 1)), "a", "b")
    owing = planned(ledger.advance(pair(2 * STEP, STEP // 2, STEP // 2 - 4 * NS_PER_MS)), "a", "b")

    assert debts(owing) == {"a": 2, "b": -2}
    assert debts(planned(owing, "a", "b", period_ns=2 * STEP)) == {"a": 0, "b": 0}


def slice_us(sharing: Sharing, pods: int) -> int:
    """Return a slice of a round that is short, or as long as the period."""
    return 96_000 // pods if sharing == Sharing() else 2000


def classed(ledger: Ledger, **classes: PodClass) -> Ledger:
    """Give pods of one weight timeslices as the ledger would have them."""
    snapshot = ledger.snapshot(STEP)
    ways = {PodClass.OFFLINE: snapshot.offline, PodClass.ONLINE: snapshot.online}
    parts = tuple(
        PodPlan(name, pod_class, slice_us(ways[pod_class], len(classes)), weight=1)
        for name, pod_class in classes.items()
    )
    return ledger.planned(Plan(0, STEP, parts, offline=ways[PodClass.OFFLINE], online=ways[PodClass.ONLINE]))


def flooded(now_ns: int, ledger: Ledger, *names: str, online: tuple[str, ...] = ()) -> Sample:
    """Report pods that filled the card between them, each turn used up."""
    pods = []
    slices = {part.pod: part.timeslice_us for part in ledger.plan.pods} if ledger.plan else {}
    for name in names:
        length_ns = OTHER.turn_ns(slices.get(name, 2000))
        turns = max(1, STEP // len(names) // (length_ns + OTHER.gap_ns))
        grant = Grant(PodClass.ONLINE if name in online else PodClass.OFFLINE)
        pods.append(PodSample(name, grant, (TsgSample("0", turns * length_ns, turns, longest_ns=length_ns),)))
    return Sample(0, now_ns, tuple(pods))


def taught(ledger: Ledger, first: int, steps: int, *names: str, online: tuple[str, ...] = ()) -> Ledger:
    """Let pods flood the card for so many steps from the first."""
    classes = {name: PodClass.ONLINE if name in online else PodClass.OFFLINE for name in names}
    if ledger.plan is None:
        ledger = classed(ledger, **classes)
    for step in range(first, first + steps):
        ledger = classed(ledger.advance(flooded(step * STEP, ledger, *names, online=online)), **classes)
    return ledger


def test_a_ledger_that_knows_nothing_asks_for_short_turns() -> None:
    snapshot = taught(Ledger(0), 0, 1, "a", "b").snapshot(STEP)

    assert snapshot.offline == Sharing(round_ns=4 * NS_PER_MS)
    assert snapshot.online == Sharing()


def test_pods_that_use_turns_up_are_given_the_whole_period() -> None:
    assert taught(Ledger(0), 0, 20, "a", "b").snapshot(STEP).offline == Sharing()


def test_a_pod_busy_alone_shares_with_nobody() -> None:
    assert taught(Ledger(0), 0, 20, "a").mixes == {}


def test_each_class_is_judged_by_its_own_pods() -> None:
    ledger = taught(Ledger(0), 0, 20, "a", "b", "on", "line", online=("on", "line"))

    assert {pod_class for pod_class, _ in ledger.mixes} == set(PodClass)
    assert {names for _, mix in ledger.mixes if (names := tuple(name for name, _ in mix))} == {
        ("a", "b"),
        ("line", "on"),
    }


def test_what_was_learnt_of_pods_is_known_when_they_meet_again() -> None:
    learnt = taught(Ledger(0), 0, 20, "a", "b")
    third = taught(learnt, 20, 2, "a", "b", "c")
    assert third.snapshot(STEP).offline == Sharing(round_ns=6 * NS_PER_MS)

    gone = taught(third, 22, 1, "a", "b")
    assert gone.snapshot(STEP).offline == Sharing()


def test_pods_with_new_weights_take_turns_as_before() -> None:
    learnt = taught(Ledger(0), 0, 20, "a", "b")
    assert learnt.plan is not None
    parts = tuple(replace(part, weight=weight) for part, weight in zip(learnt.plan.pods, (1, 2), strict=True))

    assert learnt.planned(replace(learnt.plan, pods=parts)).snapshot(STEP).offline == Sharing()


def test_of_ever_new_neighbours_only_the_latest_are_remembered() -> None:
    ledger = taught(Ledger(0), 0, 20, "a", "b")
    for number in range(30):
        ledger = taught(ledger, 20 + 4 * number, 4, "a", f"guest{number}")

    assert len(ledger.mixes) <= 16
    assert not any(("b", 1) in names for _, names in ledger.mixes)
    assert any(("guest29", 1) in names for _, names in ledger.mixes)


def test_a_round_in_which_pods_or_weights_change_teaches_nothing() -> None:
    ledger = taught(Ledger(0), 0, 2, "a", "b")
    assert ledger.plan is not None
    heavier = replace(ledger.plan, pods=tuple(replace(part, weight=2) for part in ledger.plan.pods))

    assert any(found.trials for found in ledger.advance(flooded(2 * STEP, ledger, "a", "b")).mixes.values())
    for changed in (
        ledger.planned(heavier).advance(flooded(2 * STEP, ledger, "a", "b")),
        ledger.advance(flooded(2 * STEP, ledger, "a", "b", "c")),
    ):
        assert not any(found.trials for found in changed.mixes.values())


def test_policies_see_satisfied_pods_slice_fits_and_debts() -> None:
    ledger = taught(Ledger(0), 0, 20, "a", "b")
    known = Tuning(Sharing(), satisfied=frozenset("a"), fits_slice=frozenset("b"), debts_ns={"a": 1.4, "b": -1.6})
    pods = replace(ledger, mixes=dict.fromkeys(ledger.mixes, known)).snapshot(STEP).pods

    assert [(pod.satisfied, pod.fits_slice, pod.debt_ns) for pod in pods] == [(True, False, 1), (False, True, -2)]


def test_the_longest_turn_of_a_round_is_that_of_any_tsg() -> None:
    ledger = planned(fold(pair(0, 1, 1)), "a", period_ns=3 * STEP)
    for step, lengths in enumerate([(3, 5), (9, 1), (2, 2)], start=4):
        tsgs = tuple(TsgSample(f"a/{n}", 10, 1, longest_ns=length) for n, length in enumerate(lengths))
        ledger = ledger.advance(Sample(0, step * STEP - 1, (PodSample("a", Grant(), tsgs),)))

    assert ledger.accounts["a"].round.longest_ns == 9


def started(ledger: Ledger, now_ns: int, *names: str, gated: bool = False) -> Ledger:
    """Fold in pods that ran for 4 ms in others' windows, or in their own if they are gated; b has a window."""
    windows = (Window(0, STEP // 2),)
    parts = [PodPlan(name, PodClass.OFFLINE, 2_000, windows if gated else None) for name in names]
    plan = Plan(0, STEP, (*parts, PodPlan("b", PodClass.OFFLINE, 2_000, windows)))
    new = [PodSample(name, Grant(cores=5), (TsgSample(f"{name}/0"),)) for name in (*names, "b")]
    ran = [replace(pod, tsgs=(TsgSample(f"{pod.pod}/0", 4 * NS_PER_MS, 2),)) for pod in new[:-1]]
    ledger = ledger.advance(Sample(0, now_ns, tuple(new))).planned(plan)
    return ledger.advance(Sample(0, now_ns + STEP, (*ran, new[-1])))


def spent(ledger: Ledger) -> list[str]:
    """Name the pods that may no longer start in others' windows."""
    return [pod.name for pod in ledger.snapshot(STEP).pods if pod.start_budget_spent]


@pytest.mark.parametrize("gated", [True, False])
def test_only_starts_in_windows_of_others_cost_the_budget(gated: bool) -> None:
    ledger = Ledger(0)
    for number in range(3):  # its program starts anew
        ledger = started(ledger, 2 * number * STEP, "a", gated=gated)
        ledger = ledger.advance(Sample(0, (2 * number + 1) * STEP, (PodSample("a", Grant(cores=5)),)))

    assert spent(ledger) == ([] if gated else ["a"])


def test_starts_of_all_pods_together_have_a_budget() -> None:
    """Pods that leave and come again, under the same name or another, find it spent."""
    ledger = started(Ledger(0), 0, *(f"p{number}" for number in range(12)))
    again = Sample(0, 2 * STEP, (PodSample("p0", Grant(cores=5)), PodSample("new", Grant(cores=5))))
    ledger = ledger.advance(replace(again, pods=())).advance(again)
    assert spent(ledger) == ["p0", "new"]

    assert spent(ledger.advance(replace(again, now_ns=20 * STEP))) == []


def test_a_lone_idle_context_costs_no_quota() -> None:
    plan = Plan(0, STEP, (PodPlan("a", PodClass.OFFLINE, 50_000, (Window(0, STEP // 3),)),))
    ran = PodSample("a", Grant(cores=33), (TsgSample("a/0", STEP, 1, resident=True),))
    debts = {}
    for used in (0.0, None):
        ledger = Ledger(0).advance(Sample(0, 0, (replace(ran, tsgs=(TsgSample("a/0"),)),))).planned(plan)
        for step in range(1, 15):
            ledger = ledger.advance(Sample(0, step * STEP, (ran,), used))
        debts[used] = ledger.accounts["a"].debt_ns

    assert debts[0.0] <= 0
    assert debts[None] > STEP // 4


@pytest.mark.parametrize(("run_ms", "expected"), [(90, False), (20, True)])
def test_turns_that_a_slice_ends_do_not_make_a_pod_fragmented(run_ms: int, expected: bool) -> None:
    """A hundred turns in a tenth of a second: each is a whole slice, or ends early."""
    slice_us = OTHER.slice_of_us(NS_PER_MS)
    ledger = Ledger(0)
    for number in range(30):
        tsg = TsgSample("a/0", run_ms * NS_PER_MS, starts=100)
        ledger = ledger.advance(Sample(0, number * STEP, (PodSample("a", Grant(cores=50), (tsg,), 0),)))
        ledger = ledger.planned(Plan(0, STEP, (PodPlan("a", PodClass.ONLINE, slice_us, weight=1),)))

    assert ledger.snapshot(STEP).pods[0].fragmented is expected
