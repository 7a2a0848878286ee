"""How busy pods had best take their turns: the law alone, against a small model of what pods make of theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qgpu.model import NS_PER_MS, NS_PER_S, NS_PER_US, Grant, Plan, Pod, PodClass, PodPlan, Sharing, Snapshot, Tsg
from qgpu.model.hardware_traits import OTHER
from qgpu.policies.registry import POLICIES
from qgpu.sched import slice_tuner
from qgpu.sched.candidates import RETRY_NS
from qgpu.sched.gpu_usage import GpuUse, RoundEntry
from qgpu.sched.measurement import MAX_WORK_DEBT_NS
from qgpu.sched.slice_tuner import Tuning
from qgpu.sched.tuning import KEPT_NS

PERIOD = 100 * NS_PER_MS
BY_GATE = Sharing(by_gate=True)


@dataclass
class Program:
    """What a pod does with its turns: steps of so much work (0: no end to them), or a part of each turn only."""

    step_ns: int = 0
    stays: float = 1.0
    left_ns: int = 0
    #: The length of every other step, if it differs.
    other_ns: int = 0

    def work_ns(self, slice_us: int) -> int:
        """Return for how long it works in a turn; what is left of a step that was cut comes in the next one."""
        most_ns = slice_us * OTHER.timeslice_us_ns
        if not self.step_ns:
            return int(most_ns * self.stays)
        work_ns = min(self.left_ns or self.step_ns, most_ns)
        self.left_ns = (self.left_ns or self.step_ns) - work_ns
        if self.other_ns and not self.left_ns:
            self.step_ns, self.other_ns = self.other_ns, self.step_ns
        return work_ns


def steps(ms: float) -> Program:
    """Work in steps this long, and wait for each: it is back by its next turn."""
    return Program(step_ns=round(ms * NS_PER_MS))


def uneven_steps(ms: float) -> Program:
    """Work in steps of which every other one is twice as long."""
    return Program(step_ns=round(ms * NS_PER_MS), other_ns=round(2 * ms * NS_PER_MS))


@dataclass
class Card:
    """Pods that take turns as a policy plans for what the law found; a model, to which every turn always comes."""

    programs: dict[str, Program]
    cores: Mapping[str, int | None]
    #: The part of the time in which kernels run while pods take turns by gate; None where nobody tells.
    utilization: float | None = None
    policy: str = "burst-share"
    period_ns: int = PERIOD
    known: Tuning = field(default_factory=lambda: Tuning(Sharing()))
    now_ns: int = 0
    tried: list[Sharing] = field(default_factory=list)
    refused: list[Sharing] = field(default_factory=list)
    #: When all was looked at again.
    again: set[int] = field(default_factory=set)
    work: dict[str, int] = field(default_factory=dict)
    #: The part of what a pod did that samples show; all of it for who is not named.
    shown: dict[str, float] = field(default_factory=dict)
    #: Whose turn it is, by number, how long it lasts and what is left of it.
    turns: int = -1
    whole_ns: int = 0
    turn_ns: int = 0

    def __post_init__(self) -> None:
        self.known = slice_tuner.begin([part.weight for part in self.plan().pods])

    def plan(self) -> Plan:
        """Ask the policy what to do by what is known."""
        pods = tuple(
            Pod(
                name,
                Grant(cores=self.cores[name]),
                (Tsg(f"{name}/0", busy=True),),
                debt_ns=round(self.known.debts_ns.get(name, 0)),
                satisfied=name in self.known.satisfied,
                fits_slice=name in self.known.fits_slice,
            )
            for name in self.programs
        )
        return POLICIES[self.policy].plan(Snapshot(0, self.period_ns, pods, offline=self.known.sharing))

    def tick(self) -> Tuning:
        """Let a period pass, and fold in what came of it."""
        plan = self.plan()
        uses = self._by_gate(plan) if plan.gated else self._by_slice(plan)
        for name, part in self.shown.items():
            uses[name] = uses[name]._replace(run_ns=int(uses[name].run_ns * part))
        entries = {
            part.pod: RoundEntry(Grant(cores=self.cores[part.pod]), part, uses[part.pod], 0, 1) for part in plan.pods
        }
        self.now_ns += plan.period_ns
        if plan.offline != self.known.sharing:
            self.refused.append(self.known.sharing)
        told = self.utilization if plan.gated or self.utilization is None else 1.0
        self.known = slice_tuner.advance(
            self.known, entries, plan.offline, plan.period_ns, 0, plan.period_ns, told, self.now_ns
        )
        self.tried.append(self.known.sharing)
        self.again.add(self.known.retried_ns)
        return self.known

    def run(self, seconds: float) -> Tuning:
        """Let this time pass, and count the work that is done in it."""
        until_ns = self.now_ns + round(seconds * NS_PER_S)
        self.tried, self.again, self.work = [self.known.sharing], set(), dict.fromkeys(self.programs, 0)
        while self.now_ns < until_ns:
            self.tick()
        return self.known

    @property
    def gates_tried(self) -> int:
        """Count how often gates began to move."""
        return sum(after.by_gate and not before.by_gate for before, after in pairwise(self.tried))

    @property
    def shares(self) -> dict[str, float]:
        """Return each pod's part of the work that was done."""
        return {name: work_ns / sum(self.work.values()) for name, work_ns in self.work.items()}

    def _by_slice(self, plan: Plan) -> dict[str, GpuUse]:
        """Let turns follow each other; one that the end of the period cuts goes on in the next."""
        slices = {part.pod: part.timeslice_us for part in plan.pods}
        uses, rest_ns = dict.fromkeys(slices, GpuUse()), plan.period_ns
        while rest_ns > 0:
            if not self.turn_ns:
                self.turns += 1
                name = list(slices)[self.turns % len(slices)]
                work_ns = self.programs[name].work_ns(slices[name])
                self.work[name] = self.work.get(name, 0) + work_ns
                self.turn_ns = self.whole_ns = work_ns + OTHER.switched_ns
                uses[name] = uses[name]._replace(starts=uses[name].starts + 1)
            name = list(slices)[self.turns % len(slices)]
            on_ns = min(self.turn_ns, rest_ns)
            self.turn_ns, rest_ns = self.turn_ns - on_ns, rest_ns - on_ns
            use = uses[name]._replace(run_ns=uses[name].run_ns + on_ns)
            if not self.turn_ns:
                use = use._replace(longest_ns=max(use.longest_ns, self.whole_ns))
                rest_ns -= OTHER.gap_ns
            uses[name] = use
        return uses

    def _by_gate(self, plan: Plan) -> dict[str, GpuUse]:
        """Let each pod fill its windows, except for the part by weight of those that have none."""
        if plan.offline is not None and plan.offline.reserved:
            return self._reserved(plan, plan.offline)
        uses, whole = {}, sum(part.weight for part in plan.pods)
        beside = sum(part.weight for part in plan.pods if part.windows is None) / whole
        for part in plan.pods:
            windows = sum(window.end_ns - window.start_ns for window in part.windows or ())
            run_ns = round(windows * (1 - beside)) if windows else plan.period_ns * part.weight // whole
            self.work[part.pod] = self.work.get(part.pod, 0) + run_ns
            uses[part.pod] = GpuUse(run_ns, 1, windows or plan.period_ns, plan.period_ns, run_ns)
        return uses

    def _reserved(self, plan: Plan, sharing: Sharing) -> dict[str, GpuUse]:
        """Let all take turns by slices, and then the owners of reserved time share that."""
        open_ns = max(part.turn_ns or 0 for part in plan.pods)
        uses = self._by_slice(replace(plan, period_ns=open_ns, pods=tuple(replace(p, windows=None) for p in plan.pods)))
        more_ns = (plan.period_ns - open_ns) // len(sharing.ungated)
        for name in sharing.ungated:
            self.work[name] = self.work.get(name, 0) + more_ns
            uses[name] = uses[name]._replace(run_ns=uses[name].run_ns + more_ns)
        return uses


def pair(a: Program, b: Program, weights: tuple[int, int] = (50, 50), utilization: float | None = None) -> Card:
    """Have two programs share by these quotas."""
    return Card({"a": a, "b": b}, dict(zip("ab", weights, strict=True)), utilization)


WEIGHTS = [(50, 50), (60, 30), (30, 60)]


@pytest.mark.parametrize("cores", [(50, 50), (60, 30), (95, 5), (60, 30, 10)])
def test_pods_that_use_turns_up_end_on_the_period_without_gates(cores: Sequence[int]) -> None:
    weights = dict(zip("abc", cores, strict=False))
    card = Card({name: Program() for name in weights}, weights, utilization=1.0)
    card.run(3)
    before = card.gates_tried
    known = card.run(10)

    assert (known.settled, known.sharing) == (True, Sharing())
    assert before == card.gates_tried == 0
    assert set(card.tried) == {Sharing()}
    for name, quota in weights.items():
        assert card.shares[name] == pytest.approx(quota / sum(cores), abs=0.005)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("step_ms", [0.3, 0.8, 1, 1.3, 3, 8])
def test_a_pod_of_short_steps_beside_a_flood_has_its_weight(step_ms: float, weights: tuple[int, int]) -> None:
    card = pair(steps(step_ms), Program(), weights, utilization=1.0)
    card.run(10)
    known = card.run(10)

    assert known.settled
    assert card.shares["a"] == pytest.approx(weights[0] / sum(weights), abs=0.02)


@pytest.mark.parametrize(("weights", "step_ms"), [((50, 50), 1), ((50, 50), 8), ((30, 60), 3), ((30, 60), 8)])
def test_a_round_fits_steps_where_nobody_tells_of_gates(step_ms: float, weights: tuple[int, int]) -> None:
    card = pair(steps(step_ms), Program(), weights)
    card.run(10)
    known = card.run(10)

    assert known.settled
    assert known.sharing.round_ns is not None
    assert card.shares["a"] == pytest.approx(weights[0] / sum(weights), abs=0.02)


def reweighted(card: Card, weights: tuple[int, int]) -> None:
    """Change the quotas of two programs that were measured, as the ledger does."""
    card.cores = dict(zip("ab", weights, strict=True))
    known = card.known.with_other_weights()
    assert known is not None
    card.known = known


@pytest.mark.parametrize("weights", [(30, 60), (90, 10), (10, 90)])
@pytest.mark.parametrize("programs", [(0, 0), (5, 5), (0.8, 0), (8, 0), (0.1, 0), (3, 20)])
def test_new_weights_hold_in_the_end_whatever_way_was_kept(
    programs: tuple[float, float], weights: tuple[int, int]
) -> None:
    card = pair(*map(steps, programs), (60, 30), utilization=1.0)
    card.run(10)
    reweighted(card, weights)
    card.run(20)
    card.run(10)

    assert card.shares["a"] == pytest.approx(weights[0] / sum(weights), abs=0.03)


def test_new_weights_take_effect_without_another_trial() -> None:
    card = pair(Program(), Program(), (60, 30), utilization=1.0)
    card.run(3)
    reweighted(card, (30, 60))
    card.run(1)

    assert set(card.tried) == {Sharing()}
    assert card.shares["a"] == pytest.approx(1 / 3, abs=0.02)


def test_a_kept_way_that_does_less_work_than_before_is_left() -> None:
    card = pair(Program(), Program(), (60, 30), utilization=1.0)
    card.run(3)
    reweighted(card, (30, 60))
    card.known = card.known._replace(expected=1.1)
    card.run(1)

    assert slice_tuner.begin([30, 60]).sharing in card.tried


def test_a_kept_first_round_that_serves_worse_ends_its_trial() -> None:
    card = pair(steps(0.3), Program(), (60, 30), utilization=1.0)
    card.known = slice_tuner.begin([30, 60])._replace(expected=1.1)
    card.run(5)

    assert card.known.settled


def test_other_programs_after_an_interruption_are_seen() -> None:
    card = pair(steps(0.1), Program(), (60, 30))
    card.run(5)
    settled = card.known
    card.known = slice_tuner.interrupted(settled.at(Sharing(equal=True)))
    assert card.known.unfinished
    card.programs["a"] = Program()
    card.run(1)

    assert not any(trial.rates["a"] < 0.2 for trial in card.known.trials)


def test_gates_that_nobody_asked_for_lead_to_a_first_round() -> None:
    known = slice_tuner.begin([1, 1])
    part = {name: PodPlan(name, PodClass.OFFLINE, 2000, weight=1) for name in "ab"}
    use, seen = GpuUse(50 * NS_PER_MS, 10, 0, 0, 5 * NS_PER_MS), []
    for tick in range(1, 11):
        entries = {name: RoundEntry(Grant(), part[name], use, 0, 1) for name in "ab"}
        known = slice_tuner.advance(known, entries, BY_GATE, PERIOD, 0, PERIOD, 1.0, tick * PERIOD)
        seen.append(known.sharing)

    assert slice_tuner.begin([1, 1]).sharing in seen


def test_steps_too_short_for_any_slice_get_turns_by_gate() -> None:
    known = pair(steps(0.1), Program(), utilization=1.0).run(10)

    assert (known.settled, known.sharing) == (True, BY_GATE)


@pytest.mark.parametrize("utilization", [0.3, 0.7])
@pytest.mark.parametrize("other", [Program(), steps(0.1)])
def test_gates_may_idle_where_slices_do_much_less(other: Program, utilization: float) -> None:
    known = pair(steps(0.1), replace(other), (70, 30), utilization).run(9)

    assert (known.settled, known.sharing.by_gate) == (True, utilization == 0.7)


@pytest.mark.parametrize("utilization", [0.7, 0.95])
def test_gates_are_compared_with_slices_again_later(utilization: float) -> None:
    card = pair(steps(0.1), Program(), utilization=utilization)
    card.run(10)
    known = card.run(RETRY_NS / NS_PER_S)

    assert (known.settled, known.sharing) == (True, BY_GATE)
    assert card.gates_tried == 1


def test_gates_kept_for_new_weights_are_soon_compared() -> None:
    card = pair(steps(0.1), Program(), (60, 30), utilization=1.0)
    card.run(10)
    reweighted(card, (30, 60))
    card.run(KEPT_NS / NS_PER_S)
    assert set(card.tried) == {BY_GATE}

    assert card.run(5).sharing == BY_GATE
    assert card.gates_tried == 1
    card.run(RETRY_NS / NS_PER_S - 10)
    assert set(card.tried) == {BY_GATE}


def test_two_pods_with_gaps_do_no_less_by_gate_than_by_slices() -> None:
    card = pair(steps(0.1), steps(0.1), (70, 30), utilization=0.38)

    assert not card.run(10).sharing.by_gate


def test_a_pod_with_uneven_turns_gets_no_window_of_its_own() -> None:
    programs = {"a": steps(0.1), "b": Program(), "c": uneven_steps(0.2)}
    card = Card(programs, {"a": 50, "b": 20, "c": 30}, utilization=1.0)
    known = card.run(10)

    assert (known.settled, known.sharing) == (True, Sharing(by_gate=True, ungated=frozenset("c")))
    assert [part.windows is None for part in card.plan().pods] == [False, False, True]


def test_a_pod_beside_one_with_uneven_turns_gets_no_gate() -> None:
    card = pair(steps(0.1), uneven_steps(0.2), utilization=1.0)

    assert not card.run(10).sharing.by_gate


def reserving(a: Program, b: Program, weights: tuple[int, int] = (50, 20), *, utilization: float = 1.0) -> Card:
    """Have two pods share until time is reserved for the first."""
    card = pair(a, b, weights, utilization)
    card.run(10)
    return card


def test_a_pod_beside_a_flood_with_gaps_has_reserved_time() -> None:
    known = reserving(steps(0.1), uneven_steps(0.6)).known

    assert (known.settled, known.sharing.ungated) == (True, frozenset("a"))
    assert known.sharing.reserved > 0.3


def test_new_weights_begin_without_reserved_time() -> None:
    card = reserving(steps(0.1), uneven_steps(0.6))

    assert card.known.with_other_weights() is None


@pytest.mark.parametrize(("shown", "ends"), [(0.9, False), (0.3, True)])
def test_reserved_time_ends_if_pods_leave_the_card_idle(shown: float, ends: bool) -> None:
    card = reserving(steps(0.1), uneven_steps(0.6))
    card.shown = dict.fromkeys("ab", shown)
    card.run(2)

    assert (card.known.sharing.reserved == 0) == ends


def test_reserved_time_stays_over_a_short_rest() -> None:
    card = reserving(steps(0.1), uneven_steps(0.6))
    way, card.shown = card.known.sharing, dict.fromkeys("ab", 0.3)
    card.run(0.6)
    card.shown = {}
    card.run(1)

    assert card.known.sharing == way


def leaving() -> Card:
    """Have two pods leave turns halfway however long these are, and the card idle between gates."""
    return pair(Program(stays=0.5), Program(stays=0.5), utilization=0.4)


def test_gates_that_leave_the_card_idle_are_tried_only_once() -> None:
    card = leaving()
    known = card.run(RETRY_NS / NS_PER_S - 10)

    assert card.gates_tried == 1
    assert known.settled
    assert not known.sharing.by_gate


def test_gates_stay_after_one_look_at_an_idle_card() -> None:
    card = pair(steps(0.1), Program(), utilization=1.0)
    card.run(10)
    card.utilization = 0.5
    for _ in range(4):
        card.tick()
    card.utilization = 1.0
    known = card.run(5)

    assert set(card.tried) == {BY_GATE}
    assert known.settled


def test_gates_that_worked_are_tried_again_after_seconds() -> None:
    card = pair(steps(0.1), Program(), utilization=1.0)
    card.run(10)
    card.utilization = 0.5
    assert not card.run(3).sharing.by_gate

    card.utilization = 1.0
    assert card.run(20).sharing.by_gate


def test_steps_that_slices_cut_unevenly_get_turns_by_gate() -> None:
    card = pair(steps(5), steps(5), (66, 33), utilization=1.0)

    assert card.run(10).sharing == BY_GATE


def test_gates_that_failed_by_chance_are_tried_once_more() -> None:
    card = pair(steps(1.9), steps(1.9), (66, 33), utilization=0.5)
    assert not card.run(10).sharing.by_gate

    card.utilization = 1.0
    assert card.run(RETRY_NS / NS_PER_S + 5).sharing.by_gate


def test_gates_that_failed_are_not_tried_at_every_change() -> None:
    card, tries, looks = leaving(), 0, 0
    for turn in range(int(RETRY_NS / NS_PER_S / 3) - 3):
        stay = (0.8, 0.35) if turn % 2 else (0.35, 0.8)
        card.programs |= {name: Program(stays=part) for name, part in zip("ab", stay, strict=True)}
        card.run(3)
        looks += any(before != after for before, after in pairwise(card.tried))
        tries += card.gates_tried

    assert looks > 3
    assert tries == 1


@pytest.mark.parametrize("programs", [(steps(0.3), Program()), (Program(stays=0.5), Program(stays=0.5))])
def test_gates_are_not_tried_where_nobody_tells_whether_they_pay(programs: tuple[Program, Program]) -> None:
    card = pair(*(replace(program) for program in programs))
    known = card.run(60)

    assert card.gates_tried == 0
    assert known.settled


@pytest.mark.parametrize("step_ms", [0.1, 0.3, 0.7, 1.0, 1.3])
def test_what_a_policy_would_not_do_is_never_asked_of_it_again(step_ms: float) -> None:
    card = Card({"a": steps(step_ms), "b": Program()}, {"a": 50, "b": 50}, 1.0, policy="best-effort")
    known = card.run(60)

    assert card.refused
    assert len(set(card.refused)) == len(card.refused) <= 3
    assert known.settled


@settings(max_examples=50, deadline=None)
@given(
    programs=st.lists(st.just(Program()) | st.builds(steps, st.floats(0.05, 20)), min_size=2, max_size=6),
    utilization=st.sampled_from([None, 0.5, 1.0]),
)
def test_no_slice_shrinks_for_a_quota_that_nobody_has(programs: list[Program], utilization: float | None) -> None:
    names = "abcdef"[: len(programs)]
    card = Card(
        {name: replace(program) for name, program in zip(names, programs, strict=True)},
        dict.fromkeys(names),
        utilization,
    )
    card.run(20)

    assert not any(sharing.slice_factors for sharing in card.tried)


def entry(run_ms: float, starts: int, *, starting: bool = False) -> RoundEntry:
    """Report a pod of one TSG with slices of 2 ms."""
    part = PodPlan("any", PodClass.OFFLINE, 2000, weight=1)
    return RoundEntry(
        Grant(), part, GpuUse(round(run_ms * NS_PER_MS), starts, longest_ns=2 * NS_PER_MS), 0, 1, starting
    )


@pytest.mark.parametrize(
    ("done", "a", "b"),
    [
        (None, entry(48, 24), entry(48, 24)),
        (Sharing(round_ns=4 * NS_PER_MS), entry(48, 24, starting=True), entry(48, 24)),
        (Sharing(round_ns=4 * NS_PER_MS), entry(40, 24), entry(40, 24)),
    ],
)
def test_other_plans_starts_and_a_card_not_full_teach_nothing(
    done: Sharing | None, a: RoundEntry, b: RoundEntry
) -> None:
    known = begun = slice_tuner.begin([1, 1])
    for tick in range(1, 100):
        known = slice_tuner.advance(known, {"a": a, "b": b}, done, PERIOD, 0, PERIOD, 1.0, tick * PERIOD)

    assert known.trials == ()
    assert (known.sharing, known.settled, known.satisfied) == (begun.sharing, False, frozenset())


def test_the_same_card_in_full_is_learnt_of() -> None:
    known, uses = slice_tuner.begin([1, 1]), {"a": entry(48, 24), "b": entry(48, 24)}
    for tick in range(1, 4):
        known = slice_tuner.advance(known, uses, known.sharing, PERIOD, 0, PERIOD, 1.0, tick * PERIOD)

    assert known.trials


def test_another_kind_of_work_is_looked_at_anew() -> None:
    card = pair(Program(), Program())
    assert card.run(5).sharing == Sharing()

    card.programs["a"] = steps(8)
    assert card.run(5).retries > 0
    assert len(set(card.tried)) > 1


@pytest.mark.parametrize(("before", "after"), [(Program(), steps(8)), (steps(8), Program()), (steps(1), steps(8))])
def test_whoever_comes_to_do_other_work_has_its_weight_again(before: Program, after: Program) -> None:
    card = pair(replace(before), Program())
    card.run(10)

    card.programs["a"] = replace(after)
    card.run(30)
    known = card.run(10)
    assert known.settled
    assert card.shares["a"] == pytest.approx(0.5, abs=0.02)


def test_pods_that_change_all_the_time_are_seen_ever_less_often() -> None:
    card, again = pair(Program(), Program()), set[int]()
    for second in range(60):
        card.programs["a"] = Program() if second % 2 else steps(8)
        card.run(1)
        again |= card.again

    assert 1 <= len(again - {0}) <= 16


@pytest.mark.parametrize("period_ms", [10, 20, 40])
def test_a_trial_counts_turns_of_every_pod_at_any_period(period_ms: int) -> None:
    card = pair(steps(8), Program(), (60, 30))
    card.period_ns = period_ms * NS_PER_MS
    seen = set()
    for _ in range(400):
        seen |= {(each.sharing, frozenset(each.rates)) for each in card.tick().trials}

    assert {names for _, names in seen} == {frozenset("ab")}


def test_a_pod_that_no_longer_fits_its_slice_gets_longer_turns() -> None:
    card = pair(steps(1.9), Program(), (60, 30))
    assert card.run(5).fits_slice == {"a"}

    card.programs["a"] = Program()
    assert card.run(5).sharing == Sharing()


def test_an_interrupted_retry_goes_back_to_the_settled_way() -> None:
    card = pair(steps(8), Program(), (60, 30))
    settled = card.run(5)
    assert settled.settled
    first = next(each for each in settled.trials if each.sharing != settled.sharing)
    others = tuple(each for each in settled.trials if each != first)
    retrying = settled._replace(trials=(first, *others)).at(Sharing(equal=True))

    assert slice_tuner.interrupted(retrying).sharing == settled.sharing


def test_a_trial_that_others_interrupt_is_left_for_a_known_way() -> None:
    card = pair(steps(8), Program())
    while not card.known.trials:
        card.tick()
    trial = card.known
    after = slice_tuner.interrupted(trial)

    assert not trial.settled
    assert after.settled
    assert after.sharing in {seen.sharing for seen in trial.trials}
    assert after.uses == {}


@settings(max_examples=60, deadline=None)
@given(
    weights=st.sampled_from([(60, 30), (30, 60), (50, 50), (80, 10)]),
    parts=st.lists(st.tuples(st.floats(0.4, 1), st.floats(0.4, 1)), min_size=1, max_size=40),
)
def test_looks_that_deceived_do_not_decide_for_long(weights: tuple[int, int], parts: list[tuple[float, float]]) -> None:
    """A starved host takes samples late; after ten seconds of good ones two floods have their weights."""
    card = pair(Program(), Program(), weights)
    for part in parts:
        card.shown = dict(zip("ab", part, strict=True))
        card.tick()
    card.shown = {}
    card.run(10)
    card.run(5)

    assert card.shares["a"] == pytest.approx(weights[0] / sum(weights), abs=0.03)


def test_an_interruption_takes_away_nothing_that_was_settled() -> None:
    settled = pair(steps(8), Program()).run(5)
    after = slice_tuner.interrupted(settled)

    assert (after.sharing, after.settled, after.fits_slice, after.trials) == (
        settled.sharing,
        True,
        settled.fits_slice,
        settled.trials,
    )
    assert slice_tuner.interrupted(slice_tuner.begin([1, 1])) == slice_tuner.begin([1, 1])


SHARINGS = st.one_of(
    st.none(),
    st.just(Sharing()),
    st.just(BY_GATE),
    st.just(Sharing(equal=True)),
    st.builds(Sharing, round_ns=st.integers(1_000_000, 200_000_000)),
)
USES = st.builds(
    GpuUse, st.integers(0, 2 * PERIOD), st.integers(0, 2000), st.just(0), st.just(0), st.integers(0, 2 * PERIOD)
)


@settings(max_examples=200, deadline=None)
@given(
    rounds=st.lists(
        st.tuples(
            st.lists(USES, min_size=3, max_size=3),
            st.one_of(st.just(Sharing(round_ns=1)), SHARINGS),
            st.one_of(st.none(), st.floats(0, 1)),
            st.sampled_from([False, False, False, True]),
        ),
        max_size=40,
    ),
    weights=st.lists(st.integers(1, 100_000), min_size=3, max_size=3),
    slices=st.lists(st.integers(50, 1_000_000), min_size=3, max_size=3),
    tsgs=st.integers(1, 8),
    cores=st.lists(st.none() | st.integers(1, 33), min_size=3, max_size=3),
    foreign=st.floats(0, 1),
    period_ns=st.sampled_from([10 * NS_PER_MS, PERIOD, 10 * NS_PER_S]),
)
def test_whatever_pods_do_what_is_known_stays_within_bounds(
    rounds: list[tuple[list[GpuUse], Sharing | None, float | None, bool]],
    weights: list[int],
    slices: list[int],
    tsgs: int,
    cores: list[int | None],
    foreign: float,
    period_ns: int,
) -> None:
    known, now_ns = slice_tuner.begin(weights), 0
    for uses, done, utilization, interrupted in rounds:
        now_ns += PERIOD
        if interrupted:
            known = slice_tuner.interrupted(known)
        pods = {
            name: RoundEntry(Grant(cores=quota), PodPlan(name, PodClass.OFFLINE, us, weight=weight), use, 0, tsgs)
            for name, quota, us, weight, use in zip("abc", cores, slices, weights, uses, strict=True)
        }
        # A round of 1 ns stands for doing as the law asks: mostly that is what policies do.
        done = known.sharing if done == Sharing(round_ns=1) else done
        foreign_ns = round(foreign * PERIOD)
        known = slice_tuner.advance(known, pods, done, PERIOD, foreign_ns, period_ns, utilization, now_ns)

        assert known.sharing.round_ns is None or NS_PER_US <= known.sharing.round_ns <= 10 * NS_PER_S
        assert len(known.trials) <= 8
        assert len(known.rejected) <= 16
        assert all(isfinite(rate) and rate >= 0 for seen in known.trials for rate in seen.rates.values())
        assert all(abs(debt_ns) <= MAX_WORK_DEBT_NS for debt_ns in known.debts_ns.values())
        assert known.satisfied | known.fits_slice <= pods.keys()
