"""The loop closed on measured GPU time, on the simulated pGPU: exact where the card is full, and calm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import fmean

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from qgpu.load.workload import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, Grant, Plan, PodClass
from qgpu.sched.ledger import START_BUDGET_NS, START_REFILL
from tests.simulation import (
    BATCH_64,
    BATCH_128,
    BATCH_256,
    FLOOD,
    MORE,
    PERIOD,
    Second,
    Simulation,
    batches,
    eager,
    every,
)

#: What a second's share may miss, in parts of the card.
ONE_POINT = 0.01


def simulated(policy: str, pods: Sequence[tuple[int | None, Sequence[Workload]]], **how: float) -> Simulation:
    """Set pods up, named a, b, c ... with their quotas."""
    simulation = Simulation(policy, **how)  # type: ignore[arg-type]
    for name, (cores, workloads) in zip("abcdefghijklmnop", pods, strict=False):
        simulation.add(name, Grant(cores=cores), *workloads)
    return simulation


def error(shares: Mapping[str, float], weights: Mapping[str, int]) -> float:
    """Return how far the worst pod is off its part of what all had."""
    total = sum(shares.values())
    return max(abs(shares[name] / total - weight / sum(weights.values())) for name, weight in weights.items())


FULL = {
    "floods": [(66, [FLOOD]), (33, [FLOOD])],
    "batches of 64": [(66, [BATCH_64]), (33, [BATCH_64])],
    "batches of 128": [(66, [BATCH_128]), (33, [BATCH_128])],
    "batches of 256": [(66, [BATCH_256]), (33, [BATCH_256])],
    "batches beside a flood": [(66, [BATCH_128]), (33, [FLOOD])],
    "a flood beside batches": [(66, [FLOOD]), (33, [BATCH_128])],
    "95 to 5": [(95, [batches(2000)]), (5, [batches(2000)])],
    "two processes beside a flood": [(50, [FLOOD, FLOOD]), (50, [FLOOD])],
    "two processes of batches": [(50, [batches(4000), batches(4000)]), (50, [FLOOD])],
    "three kinds": [(50, [batches(5000)]), (30, [batches(3000)]), (20, [FLOOD])],
    "sixteen floods": [(6, [FLOOD])] * 16,
}


@pytest.mark.parametrize("late_ms", [0, 4])
@pytest.mark.parametrize("pods", FULL.values(), ids=FULL.keys())
def test_every_second_is_shared_by_quota_where_the_card_is_full(
    pods: Sequence[tuple[int, Sequence[Workload]]], late_ms: float
) -> None:
    simulation = simulated("burst-share", pods, late_ms=late_ms)
    weights = {name: cores for name, (cores, _) in zip("abcdefghijklmnop", pods, strict=False)}
    simulation.pass_by(2)

    # By gate, the gaps of batches (4 % of their steps) fall into their own turns.
    limit = 1.4 * ONE_POINT if pods is FULL["a flood beside batches"] else ONE_POINT
    assert max(error(second.work, weights) for second in simulation.seconds(8)) <= limit


#: Quotas beside a pod without one: a pod waits between its steps, or the pod without a quota wakes often.
BESIDE_GUESTS = {
    "a pod that waits": [(40, [FLOOD]), (20, [Workload(kernel_us=1000, batch=8, gap_us=3000)]), (None, [FLOOD])],
    "a guest that wakes": [(60, [FLOOD]), (30, [FLOOD]), (None, [every(5000, 100)])],
}


@pytest.mark.parametrize("late_ms", [0, 4])
@pytest.mark.parametrize("pods", BESIDE_GUESTS.values(), ids=BESIDE_GUESTS.keys())
def test_a_quota_holds_every_second_beside_a_guest(
    pods: Sequence[tuple[int | None, Sequence[Workload]]], late_ms: float
) -> None:
    simulation = simulated("burst-share", pods, late_ms=late_ms)
    simulation.pass_by(3)

    for second in simulation.seconds(8):
        for name, (cores, _) in zip("abc", pods, strict=True):
            assert second.shares[name] >= (cores or 0) / 100 - ONE_POINT


@pytest.mark.parametrize(
    "pods",
    [
        [(35, [batches(24_800, 110)]), (10, [batches(25_100, 130)]), (5, [batches(27_300, 150)]), (None, [FLOOD])],
        [(45, [batches(12_170, 170)]), (None, [eager(12_290, 0.675)])],
    ],
    ids=["a flood", "a framework"],
)
def test_pods_that_wait_have_their_quota_before_a_guest(
    pods: Sequence[tuple[int | None, Sequence[Workload]]],
) -> None:
    simulation = simulated("burst-share", pods)
    simulation.pass_by(4)
    seconds = list(simulation.seconds(4))

    for name, (cores, _) in zip("abcd", pods, strict=False):
        assert fmean(second.work[name] for second in seconds) >= (cores or 0) / 100 - ONE_POINT


@pytest.mark.parametrize(
    "pods",
    [
        [(5, [batches(21_300, 240)]), (15, [eager(11_800, 0.69)]), (45, [batches(2850, 130)])],
        [(65, [batches(2060, 250)]), (10, [batches(9390, 250)])],
    ],
    ids=["three", "two"],
)
def test_no_gate_closes_where_slices_serve_all_quotas(pods: Sequence[tuple[int | None, Sequence[Workload]]]) -> None:
    simulation = simulated("burst-share", pods)

    for second in simulation.seconds(6):
        assert not any(plan.gated for plan in second.plans)
        for name, (cores, _) in zip("abc", pods, strict=False):
            assert second.work[name] >= (cores or 0) / 100 - ONE_POINT


GAPPY = [eager(3500, 0.49), eager(3500, 0.74), eager(2500, 0.26), eager(7300, 0.26)]
FULL_LENGTH = batches(57_000, 600)


@pytest.mark.parametrize("policy", ["burst-share", "best-effort"])
@pytest.mark.parametrize("cores", [(66, 33), (50, 50)])
@pytest.mark.parametrize("pods", [*[(work, work) for work in GAPPY], (FULL_LENGTH, GAPPY[2])])
def test_pods_that_leave_gaps_lose_nothing_to_plain_sharing(
    policy: str, cores: tuple[int, int], pods: tuple[Workload, Workload]
) -> None:
    done = {}
    for name in (policy, "plain"):
        simulation = simulated(name, [(quota, [work]) for quota, work in zip(cores, pods, strict=True)])
        simulation.pass_by(3)
        seconds = list(simulation.seconds(4))
        done[name] = sum(sum(second.work.values()) for second in seconds)

    assert done[policy] >= 0.97 * done["plain"]


@pytest.mark.parametrize("pods", [(batches(1000), FLOOD), (batches(2000), batches(2000)), (eager(3500, 0.5), FLOOD)])
def test_best_effort_never_closes_a_gate(pods: tuple[Workload, Workload]) -> None:
    simulation = simulated("best-effort", [(None, [work]) for work in pods])

    assert not any(plan.gated for second in simulation.seconds(5) for plan in second.plans)


@pytest.mark.parametrize(
    "pods",
    [[(30, [FLOOD])], [(60, [FLOOD]), (30, [FLOOD])], [(30, [BATCH_128]), (20, [batches(100_000)])]],
)
def test_a_fixed_share_is_exact_and_never_more_than_the_quota(pods: Sequence[tuple[int, Sequence[Workload]]]) -> None:
    simulation = simulated("fixed-share", pods)
    simulation.pass_by(2)
    seconds = list(simulation.seconds(10))

    for name, (cores, _) in zip("ab", pods, strict=False):
        got = [second.shares[name] for second in seconds]
        assert sum(got) / len(got) == pytest.approx(cores / 100, abs=0.001)
        assert max(got) <= cores / 100 + 0.002


def test_what_a_fixed_share_left_unused_is_not_saved_up() -> None:
    simulation = simulated("fixed-share", [(30, [every(1_000_000, 20_000)])])
    simulation.pass_by(5)
    simulation.host.start_load("a", 0, FLOOD)

    assert next(iter(simulation.seconds(1))).shares["a"] <= 0.31


@pytest.mark.parametrize("late_ms", [0, 4])
@pytest.mark.parametrize("name", ["batches of 64", "batches of 128", "batches beside a flood", "three kinds"])
def test_nothing_swings_for_a_minute(name: str, late_ms: float) -> None:
    simulation = simulated("burst-share", FULL[name], late_ms=late_ms)
    simulation.pass_by(4)
    ends, shares = [], []
    for second in simulation.seconds(60):
        ends += [part.windows[-1].end_ns for plan in second.plans for part in plan.pods[:1] if part.windows]

        shares.append(second.work["a"])

    assert max(ends, default=0) - min(ends, default=0) <= 3 * NS_PER_MS
    assert max(shares) - min(shares) <= 2 * ONE_POINT


def test_floods_never_meet_a_gate() -> None:
    simulation = simulated("burst-share", FULL["floods"])

    assert not any(plan.gated for second in simulation.seconds(60) for plan in second.plans)


def churn(simulation: Simulation, pod: str, workload: Workload, stay_ns: int = PERIOD, away_ns: int = PERIOD) -> None:
    """Let a process of a pod start and end in turn: by default it stays for a period, and is away for one."""
    running: list[int] = []

    def start_or_end(now_ns: int) -> None:
        if running:
            simulation.host.stop_load(running.pop())
        else:
            running.append(simulation.host.start_load(pod, 0, workload))
        next_ns = now_ns + (stay_ns if running else away_ns)
        simulation.host.call_at(0, next_ns, lambda: start_or_end(next_ns))

    simulation.host.call_at(0, 30 * NS_PER_MS, lambda: start_or_end(30 * NS_PER_MS))


@pytest.mark.parametrize("late_ms", [0, 4])
def test_neighbours_process_churn_takes_no_share(late_ms: float) -> None:
    """Slices of a pod are others with each process that comes or goes; what is known of its neighbours stays."""
    simulation = simulated("burst-share", [(50, [BATCH_128]), (50, [FLOOD])], late_ms=late_ms)
    churn(simulation, "b", Workload(kernel_us=30, batch=1, gap_us=2000))
    simulation.pass_by(5)

    assert min(second.shares["a"] for second in simulation.seconds(5)) >= 0.45


@pytest.mark.parametrize("late_ms", [0, 4])
def test_pod_starting_ten_times_a_second_cannot_hide_lost_share(late_ms: float) -> None:
    """All slices are short while it starts, and long again once it has ended."""
    simulation = simulated("burst-share", [(40, [BATCH_128]), (40, [FLOOD])], late_ms=late_ms)
    simulation.host.admit("c", {0: Grant(cores=20)})
    churn(simulation, "c", Workload(kernel_us=100, batch=1, gap_us=5000))
    simulation.pass_by(6)

    for second in simulation.seconds(5):
        assert second.shares["a"] >= 0.4 * (second.shares["a"] + second.shares["b"])


def test_gates_go_when_the_rival_rests_and_come_back_with_it() -> None:
    simulation = simulated("burst-share", [(66, [BATCH_128]), (33, [FLOOD])])
    simulation.pass_by(2)
    simulation.host.stop_load(2)

    alone = list(simulation.seconds(3))[-1]
    assert not any(plan.gated for plan in alone.plans)
    simulation.host.start_load("b", 0, FLOOD)
    simulation.pass_by(1)
    assert error(next(iter(simulation.seconds(1))).work, {"a": 66, "b": 33}) <= ONE_POINT


@pytest.mark.parametrize(
    ("cores", "workload", "wanted"),
    [(50, every(5000, 1000), 0.2), (90, every(10_000, 3000), 0.3), (50, every(60_000, 10_000), 0.166)],
)
def test_pausing_pod_gets_its_demand_without_gates(cores: int, workload: Workload, wanted: float) -> None:
    simulation = simulated("burst-share", [(100 - cores, [FLOOD]), (cores, [workload])])
    simulation.pass_by(2)
    for second in simulation.seconds(5):
        assert second.shares["b"] >= wanted * 0.97
        assert sum(second.shares.values()) >= 0.95
        assert not any(plan.gated for plan in second.plans)


@pytest.mark.parametrize(("number", "workload"), [(2, every(1000, 100)), (2, every(2000, 1000)), (3, every(2000, 700))])
def test_what_clock_driven_pods_leave_is_lent_to_a_flood(number: int, workload: Workload) -> None:
    simulation = simulated("burst-share", [(25, [FLOOD]), *[(25, [workload])] * number])
    simulation.pass_by(2)
    for second in simulation.seconds(5):
        assert sum(second.shares.values()) >= 0.85
        assert not any(plan.gated for plan in second.plans)


def test_a_program_that_starts_does_not_wait_for_whole_turns() -> None:
    simulation = simulated("burst-share", [(60, [FLOOD]), (30, [FLOOD])])
    simulation.pass_by(2)
    simulation.add("c", Grant(cores=10), Workload(kernel_us=100, batch=1, gap_us=500, count=30))
    simulation.pass_by(1)

    assert simulation.host.progress(3).kernels == 30


@pytest.mark.parametrize("cores", [10, 1])
def test_fixed_share_program_starts_in_time_and_takes_no_share(cores: int) -> None:
    simulation = simulated("fixed-share", [(50, [FLOOD]), (20, [FLOOD])])
    simulation.pass_by(2)
    simulation.add("c", Grant(cores=cores))
    for _ in range(5):
        simulation.host.start_load("c", 0, Workload(kernel_us=300, batch=1, gap_us=25_000, count=8))
        second = next(iter(simulation.seconds(1)))
        assert second.shares["a"] == pytest.approx(0.5, abs=0.004)
        assert second.shares["b"] == pytest.approx(0.2, abs=0.004)
        assert second.work["c"] <= 0.01 + 0.004
        assert simulation.host.progress(max(simulation.host._loads)).done or cores == 1


@pytest.mark.parametrize(("stay_ms", "away_ms"), [(20, 10), (40, 40), (100, 50), (230, 60)])
def test_restarting_over_and_over_gains_nothing_by_fixed_share(stay_ms: int, away_ms: int) -> None:
    simulation = simulated("fixed-share", [(50, [FLOOD]), (50, [])])
    churn(simulation, "b", Workload(kernel_us=1_000_000, batch=0), stay_ms * NS_PER_MS, away_ms * NS_PER_MS)
    simulation.pass_by(2)

    shares = [second.shares["a"] for second in simulation.seconds(5)]
    assert min(shares) >= 0.5 - START_REFILL - START_BUDGET_NS / NS_PER_S
    assert sum(shares) / len(shares) >= 0.497  # what it lost is paid back


@pytest.mark.parametrize("target_ms", [2, 20])
def test_a_long_request_waits_no_longer_than_its_target(target_ms: int) -> None:
    simulation = Simulation("burst-share")
    simulation.host.admit("on", {0: Grant(PodClass.ONLINE, latency_target_ns=target_ms * NS_PER_MS)})
    load = simulation.host.start_load("on", 0, Workload(kernel_us=400_000, batch=1, period_us=1_000_000))
    simulation.pass_by(3)
    alone = max(simulation.host.progress(load).latencies_us)
    simulation.add("off", Grant(), FLOOD)
    simulation.pass_by(2)
    simulation.host.progress(load)
    simulation.pass_by(10)

    assert max(simulation.host.progress(load).latencies_us) - alone <= target_ms * 1000


def test_program_that_starts_and_stalls_does_not_shorten_slices() -> None:
    simulation = simulated("burst-share", [(60, [FLOOD]), (30, [FLOOD])])
    simulation.pass_by(2)
    simulation.add("c", Grant(cores=10), every(1_000_000, 100))
    slices = [second.plans[-1].pods[0].timeslice_us for second in simulation.seconds(6)]

    assert slices[0] < 5_000
    assert min(slices[4:]) > 50_000


def test_offline_pods_beside_an_online_one_share_by_quota() -> None:
    simulation = Simulation("burst-share")
    simulation.add("service", Grant(PodClass.ONLINE), every(10_000, 100))
    for name, workload in (("a", FLOOD), ("b", FLOOD), ("c", BATCH_128), ("d", BATCH_256)):
        simulation.add(name, Grant(cores=20), workload)
    simulation.pass_by(4)
    parts = [second.shares for second in simulation.seconds(12)]
    shares = {name: sum(part[name] for part in parts) for name in "abcd"}

    assert error(shares, dict.fromkeys("abcd", 20)) <= 0.003


#: Steps that are no shorter than what slices of other pods add up to.
LONG_STEPS = st.one_of(
    st.just(FLOOD), st.builds(batches, st.floats(4000, 20_000), st.floats(0, 80)), st.just(BATCH_128)
)
WORKLOADS = st.one_of(LONG_STEPS, st.builds(batches, st.floats(2000, 4000), st.floats(0, 80)))


def come_and_go(workloads: st.SearchStrategy[Workload]) -> st.SearchStrategy[ComeAndGo]:
    """Draw pods, a guest beside them, and how late and how randomly samples come."""
    quotas, programs = st.integers(5, 30), st.lists(workloads, min_size=1, max_size=2)
    pods = st.lists(st.tuples(quotas, programs), min_size=2, max_size=3)
    return st.builds(
        ComeAndGo, pods, st.tuples(st.integers(5, 10), workloads), st.sampled_from([0, 1, 5]), st.integers(0, 99)
    )


@dataclass(frozen=True, slots=True)
class ComeAndGo:
    """Pods with quotas, and a guest that comes after a second and leaves again."""

    pods: list[tuple[int, list[Workload]]]
    guest: tuple[int, Workload]
    late_ms: float
    seed: int

    def settled(self) -> Iterator[tuple[dict[str, int], list[Second]]]:
        """Yield the quotas of who is there and four seconds: with the guest, then without; each after four others."""
        simulation = simulated("burst-share", self.pods, late_ms=self.late_ms, seed=self.seed)
        quotas = {name: cores for name, (cores, _) in zip("abc", self.pods, strict=False)}
        simulation.pass_by(1)
        simulation.add("guest", Grant(cores=self.guest[0]), self.guest[1])
        simulation.pass_by(4)
        yield {**quotas, "guest": self.guest[0]}, list(simulation.seconds(4))
        simulation.host.stop_load(max(simulation.host._loads))
        simulation.host.retire("guest")
        simulation.pass_by(4)
        yield quotas, list(simulation.seconds(4))


@hypothesis_settings(max_examples=20 * MORE, deadline=None)
@given(case=come_and_go(LONG_STEPS))
def test_shares_settle_whichever_pods_come_and_go(case: ComeAndGo) -> None:
    """Most mixes are within one point, the worst of 2000 within 6. One second may hold a trial that serves badly."""
    for weights, seconds in case.settled():
        works = [{name: second.work[name] for name in weights} for second in seconds]
        assert error({name: sum(work[name] for work in works) for name in weights}, weights) <= 12 * ONE_POINT
        assert sorted(error(work, weights) for work in works)[-2] <= 19 * ONE_POINT


@hypothesis_settings(max_examples=20 * MORE, deadline=None)
@given(case=come_and_go(WORKLOADS))
def test_quotas_hold_whichever_pods_come_and_go(case: ComeAndGo) -> None:
    """A pod with steps of 2 ms has its quota, but less than its part of what is lent. The worst of 6000 lacks 9 points.

    The worst mixes ask for nearly all of the card by quota, and lose a part of it to switches.
    """
    for quotas, seconds in case.settled():
        for name, cores in quotas.items():
            assert fmean(second.work[name] for second in seconds) >= cores / 100 - 12 * ONE_POINT


def test_a_few_turns_of_which_one_was_cut_off_decide_nothing() -> None:
    """Three turns of a long round looked like full ones that the trial's edge had cut off."""
    steps = batches(7930, 328)
    weights = {"a": 14, "b": 20, "c": 14}
    simulation = simulated("burst-share", [(14, [steps]), (20, [FLOOD]), (14, [steps])])
    simulation.pass_by(1)
    simulation.add("guest", Grant(cores=8), steps)
    simulation.pass_by(8)
    simulation.host.stop_load(max(simulation.host._loads))
    simulation.host.retire("guest")

    assert all(
        error({name: second.work[name] for name in weights}, weights) <= 0.1 for second in simulation.seconds(12)
    )


DEMANDS = st.builds(
    lambda period_us, part: every(period_us, period_us * part),
    st.sampled_from([2000, 5000, 20_000, 100_000]),
    st.floats(0.02, 0.9),
)
ANY = st.one_of(WORKLOADS, DEMANDS)


@hypothesis_settings(max_examples=8 * MORE, deadline=None)
@given(
    pods=st.lists(st.tuples(st.integers(5, 30), st.lists(ANY, min_size=1, max_size=2)), min_size=2, max_size=3),
    guest=st.tuples(ANY, st.integers(1, 6)),
    late_ms=st.sampled_from([0, 1, 5]),
    seed=st.integers(0, 99),
)
@example(  # one turn of each pod must not decide about a long round
    pods=[(26, [FLOOD]), (30, [batches(15_211, 0)]), (14, [batches(17_864.386676389266, 0)])],
    guest=(BATCH_128, 5),
    late_ms=5,
    seed=19,
)
def test_plans_do_not_oscillate_for_a_minute_after_any_guest(
    pods: list[tuple[int, list[Workload]]], guest: tuple[Workload, int], late_ms: float, seed: int
) -> None:
    simulation = simulated("burst-share", pods, late_ms=late_ms, seed=seed)
    simulation.pass_by(3)
    simulation.add("guest", Grant(cores=8), guest[0])
    simulation.pass_by(guest[1])
    simulation.host.stop_load(max(simulation.host._loads))
    simulation.host.retire("guest")
    simulation.pass_by(5)
    seconds = list(simulation.seconds(60))
    plans = [plan for second in seconds for plan in second.plans]

    # What pods do is looked at again where it has changed, half as often every time.
    changes = [before != after for before, after in pairwise([_mechanism(plan) for plan in plans])]
    assert sum(changes) <= 8 * len(pods)
    assert sum(changes[len(changes) // 2 :]) <= 4 * len(pods)
    unchanged = groupby(seconds, lambda second: {_mechanism(plan) for plan in second.plans})
    for stretch in (list(stretch) for mechanisms, stretch in unchanged if len(mechanisms) == 1):
        for at, name in zip(range(len(pods)), "abc", strict=False):
            # A pod whose timers ask for all of its part or more misses some periods: 0.32 of the card were seen.
            shares = [second.shares[name] for second in stretch]
            assert max(shares) - min(shares) <= 0.4
            own = [windows[0] for second in stretch for plan in second.plans if (windows := plan.pods[at].windows)]
            lengths = [window.end_ns - window.start_ns for window in own]
            assert max(lengths, default=0) - min(lengths, default=0) <= 0.04 * stretch[0].plans[0].period_ns


def _mechanism(plan: Plan) -> tuple[int, ...]:
    return plan.period_ns, *(part.windows is None for part in plan.pods)


@hypothesis_settings(max_examples=20 * MORE, deadline=None)
@given(
    demands=st.lists(
        st.tuples(st.sampled_from([2000, 5000, 20_000, 100_000, 700_000]), st.floats(0.02, 0.9)), min_size=1, max_size=3
    ),
    late_ms=st.sampled_from([0, 5]),
    seed=st.integers(0, 99),
)
def test_no_idle_time_and_flood_keeps_quota_at_any_demand(
    demands: list[tuple[int, float]], late_ms: float, seed: int
) -> None:
    pods = [(25, [FLOOD]), *((25, [every(period_us, period_us * part)]) for period_us, part in demands)]
    simulation = simulated("burst-share", pods, late_ms=late_ms, seed=seed)
    simulation.pass_by(4)
    seconds = list(simulation.seconds(8))

    assert sum(second.shares["a"] for second in seconds) / 8 >= 0.25 * 0.85
    assert sum(sum(second.shares.values()) for second in seconds) / 8 >= 0.8


@hypothesis_settings(max_examples=15 * MORE, deadline=None)
@given(
    cores=st.sampled_from([(66, 33), (80, 20), (90, 10), (60, 30)]),
    period_us=st.sampled_from([5000, 10_000, 20_000, 50_000, 100_000]),
    part=st.floats(0.3, 0.8),
    beside=st.sampled_from([FLOOD, batches(2000, 30), batches(9000, 200)]),
)
@example(cores=(90, 10), period_us=5000, part=0.4375, beside=batches(9000, 200))
@example(cores=(80, 20), period_us=50_000, part=0.75, beside=batches(2000, 30))
def test_a_timer_within_its_quota_misses_no_step(
    cores: tuple[int, int], period_us: int, part: float, beside: Workload
) -> None:
    work = cores[1] / 100 * part
    simulation = simulated("burst-share", [(cores[0], [beside]), (cores[1], [every(period_us, period_us * work)])])
    simulation.pass_by(4)
    done = fmean(second.work["b"] for second in simulation.seconds(4))

    assert done >= 0.9 * work


#: Pods that gates or short slices served badly: frameworks and batches, and short steps whose switches cost much.
HARD = {
    "a framework beside batches": [(40, [eager(5950, 0.8)]), (50, [batches(6200, 80)])],
    "a framework that rarely runs": [(10, [eager(7400, 0.25)]), (80, [batches(5100)]), (5, [batches(14_600, 100)])],
    "a flood, batches, a framework": [(35, [eager(10_600, 0.36)]), (15, [batches(22_800)]), (45, [FLOOD])],
    "short steps": [(80, [batches(700, 60)]), (20, [batches(7900, 60)])],
}


@pytest.mark.parametrize("pods", HARD.values(), ids=HARD.keys())
def test_nine_tenths_of_every_quota_without_losing_the_card(pods: Sequence[tuple[int, Sequence[Workload]]]) -> None:
    simulation = simulated("burst-share", pods)
    simulation.pass_by(4)
    seconds = list(simulation.seconds(5))
    work = {name: fmean(second.work[name] for second in seconds) for name in seconds[0].work}

    assert sum(work.values()) > 0.88
    for (cores, _), done in zip(pods, work.values(), strict=True):
        assert done > 0.87 * cores / 100


@pytest.mark.parametrize(
    ("cores", "steps", "beside"),
    [(80, batches(110, 150), batches(5100, 275)), (60, batches(90, 27), eager(1760, 0.855, 10))],
)
def test_short_steps_keep_their_speed_in_reserved_time(cores: int, steps: Workload, beside: Workload) -> None:
    speeds = []
    for pods in ([(cores, [steps])], [(cores, [steps]), (10, [beside])]):
        simulation = simulated("burst-share", pods)
        simulation.pass_by(4)
        speeds.append(fmean(second.work["a"] for second in simulation.seconds(3)))

    assert speeds[1] > 0.6 * speeds[0]


def test_best_effort_tries_no_round_of_a_whole_period() -> None:
    simulation = simulated("best-effort", [(60, [batches(5000, 300)]), (30, [batches(700, 60)])])
    plans = [plan for second in simulation.seconds(5) for plan in second.plans]

    assert max(part.timeslice_us for plan in plans for part in plan.pods) < 10_000
