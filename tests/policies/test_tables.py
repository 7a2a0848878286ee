"""Stories about each policy, small enough to check with pencil and paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from qgpu.errors import UnknownNameError
from qgpu.model import (
    MAX_TIMESLICE_US,
    NS_PER_MS,
    NS_PER_S,
    Grant,
    OnIdle,
    Pod,
    PodClass,
    Sharing,
    Snapshot,
    Tsg,
    Window,
)
from qgpu.model.hardware_traits import H200, OTHER
from qgpu.policies import latency_targets
from qgpu.policies.mechanism import OWED_STEP_NS
from qgpu.policies.online_first import LONE_ROUND_US, TURN_NS
from qgpu.policies.registry import POLICIES, compose, find

PERIOD = 100 * NS_PER_MS


def pod(
    name: str,
    cores: int | None = None,
    *,
    tsgs: int = 1,
    busy: bool = True,
    online: bool = False,
    target_ms: float | None = None,
) -> Pod:
    """Build a pod of this many compute TSGs; with a latency target it is online."""
    pod_class = PodClass.ONLINE if online or target_ms else PodClass.OFFLINE
    grant = Grant(pod_class, cores, latency_target_ns=round(target_ms * NS_PER_MS) if target_ms else None)
    return Pod(name, grant, tuple(Tsg(f"{name}/{n}", busy) for n in range(tsgs)))


def slices(policy: str, *pods: Pod) -> list[int]:
    """Return how long turns last in ms, with the time between two of them, for the timeslices that a policy plans."""
    parts = POLICIES[policy].plan(Snapshot(0, PERIOD, pods)).pods
    return [round((OTHER.turn_ns(part.timeslice_us) + OTHER.gap_ns) / NS_PER_MS) for part in parts]


@pytest.mark.parametrize(
    ("policy", "pods", "expected_ms"),
    [
        ("best-effort", (pod("a"),), [100]),
        ("best-effort", (pod("a", 90), pod("b", 10)), [50, 50]),
        ("best-effort", (pod("a"), pod("b", tsgs=2)), [50, 25]),
        ("best-effort", (pod("a"), pod("b", busy=False)), [50, 50]),
        ("burst-share", (pod("a", 30),), [100]),
        ("burst-share", (pod("a", 50), pod("b", 25)), [67, 33]),
        # A pod that is not on the GPU yet takes no time of the round.
        ("burst-share", (pod("a", 50), pod("b", 25, tsgs=0)), [100, 50]),
        ("burst-share", (pod("a", 70), pod("b", 30)), [70, 30]),
        ("burst-share", (pod("a", 60), pod("b"), pod("c")), [60, 20, 20]),
        ("burst-share", (pod("a", 60, tsgs=6), pod("b", 40)), [10, 40]),
    ],
)
def test_turns_divide_the_period(policy: str, pods: tuple[Pod, ...], expected_ms: list[int]) -> None:
    assert expected_ms == slices(policy, *pods)


def test_burst_share_gives_guests_a_token_turn_where_all_is_sold() -> None:
    plan = POLICIES["burst-share"].plan(Snapshot(0, PERIOD, (pod("a", 100), pod("guest"))))

    assert [part.timeslice_us for part in plan.pods] == [97_411, 50]


def test_fixed_share_lays_one_kept_window_per_pod() -> None:
    plan = POLICIES["fixed-share"].plan(Snapshot(0, PERIOD, (pod("a", 30), pod("b", 20), pod("c"))))

    expected = [
        (Window(0, 30 * NS_PER_MS, OnIdle.KEEP),),
        (Window(30 * NS_PER_MS, 50 * NS_PER_MS, OnIdle.KEEP),),
        (),
    ]
    assert expected == [part.windows for part in plan.pods]


@pytest.mark.parametrize(("debt_ms", "gated"), [(0, False), (-5, False), (1, True)])
def test_fixed_share_lets_pod_without_debt_start_at_once(debt_ms: int, gated: bool) -> None:
    starting = pod("b", 20)._replace(starting=True, debt_ns=debt_ms * NS_PER_MS)
    plan = POLICIES["fixed-share"].plan(Snapshot(0, PERIOD, (pod("a", 30), pod("c", 40, tsgs=8), starting)))

    assert [part.timeslice_us for part in plan.pods] == [2000, 500, 2000]
    assert [part.windows is not None for part in plan.pods] == [True, True, gated]


@pytest.mark.parametrize("spent", [False, True])
def test_fixed_share_gates_a_pod_that_started_too_often(spent: bool) -> None:
    starting = pod("b", 20)._replace(starting=True, start_budget_spent=spent)
    plan = POLICIES["fixed-share"].plan(Snapshot(0, PERIOD, (pod("a", 30), starting)))

    assert [part.windows is not None for part in plan.pods] == [True, spent]


@pytest.mark.parametrize("target_ms", [None, 2])
def test_fixed_share_starts_together_meet_no_gate_beside_online(
    target_ms: float | None,
) -> None:
    starting = [pod(name, 20)._replace(starting=True) for name in "ab"]
    online = pod("on", 20, online=True, target_ms=target_ms)

    assert not compose("fixed-share", "best-effort")(Snapshot(0, PERIOD, (online, *starting))).gated


def test_fixed_share_needs_no_gate_for_the_whole_card() -> None:
    assert not POLICIES["fixed-share"].plan(Snapshot(0, PERIOD, (pod("a", 100),))).gated


@pytest.mark.parametrize("offline", [name for name, info in POLICIES.items() if not info.caps])
def test_one_busy_offline_pod_beside_an_online_one_needs_no_gate(offline: str) -> None:
    pods = (pod("on", online=True), pod("off"), pod("idle", busy=False))
    plan = compose(offline, "best-effort")(Snapshot(0, PERIOD, pods))

    assert [part.timeslice_us for part in plan.pods] == [LONE_ROUND_US, 50, 50]
    assert not plan.gated


def test_offline_turns_beside_online_pod_yield() -> None:
    pods = (pod("on", online=True), pod("a", 60), pod("b", 20))
    plan = compose("burst-share", "best-effort")(Snapshot(0, PERIOD, pods))

    expected = [
        None,
        (Window(0, 3 * TURN_NS // 2, OnIdle.YIELD),),
        (Window(3 * TURN_NS // 2, 2 * TURN_NS, OnIdle.YIELD),),
    ]
    assert expected == [part.windows for part in plan.pods]


def test_online_pods_take_short_rounds_among_themselves() -> None:
    pods = (pod("a", 60, online=True), pod("b", 20, online=True))
    plan = compose("best-effort", "burst-share")(Snapshot(0, PERIOD, pods))

    assert [part.timeslice_us for part in plan.pods] == [6040, 1959]


@pytest.mark.parametrize(
    ("target_ms", "waits", "expected_us"),
    [
        # The measured points, read backwards: p99 less 137 µs of the pod alone, and 80 µs for requests in step.
        (0.336, 1, 50),
        (0.476, 1, 200),
        (1.256, 1, 1000),
        # Between them, below them and beyond them.
        (0.424, 1, 150),
        (0.25, 1, 50),
        (2.08, 1, 1804),
        (20.08, 1, 19_382),
        # Four TSGs to wait for add four times what one adds, as was measured: 1162 - 137 µs.
        (1.104, 4, 50),
        (20.08, 4, 4734),
    ],
)
def test_latency_target_allows_slice_measured_to_keep_it(target_ms: float, waits: int, expected_us: int) -> None:
    assert latency_targets.slice_us(round(target_ms * NS_PER_MS), waits, H200) == expected_us


@pytest.mark.parametrize(
    ("pods", "expected_us"),
    [
        ((pod("on", target_ms=2), pod("off")), [MAX_TIMESLICE_US, 1726]),
        ((pod("on", target_ms=2, busy=False), pod("off")), [MAX_TIMESLICE_US, 1726]),
        ((pod("on", target_ms=2), pod("off", tsgs=2)), [MAX_TIMESLICE_US, 1726]),
        # TSGs of one pod take turns: online work waits for one of them.
        ((pod("on", online=True), pod("off", tsgs=4)), [LONE_ROUND_US, 50]),
        ((pod("on", target_ms=1), pod("off", tsgs=4)), [MAX_TIMESLICE_US, 738]),
        ((pod("on", online=True), pod("x", target_ms=1), pod("off", tsgs=2)), [500, 500, 50]),
        ((pod("on", online=True), pod("x", target_ms=9), pod("off", tsgs=2)), [2755, 2755, 50]),
        # Who has no target wants the least there is, of one that runs alone.
        ((pod("on", target_ms=2), pod("x", online=True, busy=False), pod("off")), [778, 778, 50]),
        # Several online pods wait for each other too: their round follows from the tightest target.
        ((pod("a", target_ms=20), pod("b", target_ms=50)), [9578, 9578]),
        ((pod("a", target_ms=20), pod("b", target_ms=50), pod("off")), [6335, 6335, 6335]),
    ],
)
def test_slices_follow_from_the_tightest_latency_target(pods: tuple[Pod, ...], expected_us: list[int]) -> None:
    plan = compose("burst-share", "best-effort")(Snapshot(0, PERIOD, pods))

    assert [part.timeslice_us for part in plan.pods] == expected_us


@pytest.mark.parametrize(("target_ms", "period_ns"), [(1, 4 * TURN_NS), (2, 500 * NS_PER_MS)])
def test_loose_target_makes_whole_turns_a_second(target_ms: float, period_ns: int) -> None:
    pods = (pod("on", target_ms=target_ms), *(pod(name, 25) for name in "abcd"))

    assert compose("burst-share", "best-effort")(Snapshot(0, PERIOD, pods)).period_ns == period_ns


def test_online_pod_off_the_card_changes_nothing() -> None:
    pods = (pod("on", online=True, tsgs=0), pod("a", 50), pod("b", 50))
    plan = compose("burst-share", "best-effort")(Snapshot(0, PERIOD, pods))

    assert [part.timeslice_us for part in plan.pods] == [LONE_ROUND_US, 48_666, 48_666]


def test_fixed_turns_of_both_classes_lie_side_by_side() -> None:
    pods = (pod("on", 30, online=True), pod("off", 20))
    plan = compose("fixed-share", "fixed-share")(Snapshot(0, PERIOD, pods))

    expected = [
        (Window(0, 30 * NS_PER_MS, OnIdle.KEEP),),
        (Window(30 * NS_PER_MS, 50 * NS_PER_MS, OnIdle.KEEP),),
    ]
    assert expected == [part.windows for part in plan.pods]


@pytest.mark.parametrize("name", ["2", "burst-share"])
def test_a_policy_is_found_by_name_and_number(name: str) -> None:
    assert find(name) == "burst-share"


def test_an_unknown_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(UnknownNameError, match=", ".join(POLICIES)):
        find("burst")


def owing(name: str, cores: int | None = None, *, debt_ms: float = 0, satisfied: bool = False) -> Pod:
    """Build a busy pod that owes this much, or that has all it asks for."""
    return pod(name, cores)._replace(satisfied=satisfied, debt_ns=round(debt_ms * NS_PER_MS))


BY_GATE, EQUAL = Sharing(by_gate=True), Sharing(equal=True)


def windows(policy: str, *pods: Pod, offline: Sharing = BY_GATE) -> list[tuple[float, float] | None]:
    """Return the first window in ms of each pod that has one."""
    parts = POLICIES[policy].plan(Snapshot(0, PERIOD, pods, offline=offline)).pods
    return [(w[0].start_ns / NS_PER_MS, w[0].end_ns / NS_PER_MS) if (w := part.windows) else None for part in parts]


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ((owing("a", 60), owing("b", 20)), [(0, 75), (75, 100)]),
        ((owing("a", 60), pod("b", 20, busy=False)), [None, None]),
        # A turn would be wasted on who has all it asks for, and who is left alone needs none.
        ((owing("a", 60), owing("b", 20, satisfied=True)), [None, None]),
        ((owing("a", 60), owing("b", 20, satisfied=True), owing("c", 20)), [(0, 75), None, (75, 100)]),
        ((owing("a", 60), pod("b", 20, busy=False), owing("c", 20)), [(0, 75), None, (75, 100)]),
        ((owing("a", 50), owing("b", 25), owing("c", 25)), [(0, 75), (75, 112.5), (112.5, 150)]),
        # A quarter of what is owed is paid in a period, in steps of 0.1 ms; and no more than bounds allow.
        ((owing("a", 50, debt_ms=4), owing("b", 50, debt_ms=-4)), [(0, 49), (49, 100)]),
        ((owing("a", 50, debt_ms=-100), owing("b", 50)), [(0, 51.456311), (51.456311, 100)]),
    ],
)
def test_burst_share_takes_turns_where_timeslices_fail(
    pods: tuple[Pod, ...], expected: list[tuple[float, float] | None]
) -> None:
    assert expected == windows("burst-share", *pods)


@pytest.mark.parametrize("pods", [("a", "b", "c"), ("a", "b")])
def test_an_ungated_pod_has_slices_beside_turns_by_gate(pods: tuple[str, ...]) -> None:
    quotas, sharing = {"a": 60, "b": 20, "c": 20}, Sharing(by_gate=True, ungated=frozenset(pods[-1]))
    owners = tuple(owing(name, quotas[name]) for name in pods)
    plan = POLICIES["burst-share"].plan(Snapshot(0, PERIOD, owners, offline=sharing))

    assert [part.windows is None for part in plan.pods] == ([False, False, True] if "c" in pods else [True, True])
    if plan.gated:
        assert plan.pods[0].timeslice_us == pytest.approx(4 * plan.pods[2].timeslice_us, rel=0.1)


RESERVED = Sharing(round_ns=4 * NS_PER_MS, by_gate=True, ungated=frozenset("a"), reserved=0.4)


@pytest.mark.parametrize(
    ("policy", "pods", "expected"),
    [
        ("burst-share", (owing("a", 40), owing("b", 20), owing("c", 20)), [None, (0, 60), (0, 60)]),
        ("burst-share", (owing("a", 40), owing("b", 20)), [None, (0, 60)]),
        ("burst-share", (owing("a", 40), pod("b", 20, busy=False)), [None, None]),
        ("burst-share", (owing("a", 40), owing("b", 20)._replace(starting=True)), [None, None]),
        ("best-effort", (owing("a"), owing("b")), [None, None]),
    ],
)
def test_reserved_time_closes_the_gates_of_all_but_its_owners(
    policy: str, pods: tuple[Pod, ...], expected: list[tuple[float, float] | None]
) -> None:
    assert windows(policy, *pods, offline=RESERVED) == expected


def test_a_short_period_is_longer_where_time_is_reserved() -> None:
    pods = (owing("a", 40), owing("b", 20))
    plan = POLICIES["burst-share"].plan(Snapshot(0, PERIOD // 10, pods, offline=RESERVED))

    assert plan.period_ns > PERIOD // 10
    assert plan.pods[1].turn_ns == pytest.approx(0.6 * plan.period_ns)


@pytest.mark.parametrize("offline", [Sharing(), Sharing(round_ns=4 * NS_PER_MS), EQUAL])
def test_burst_share_moves_no_gate_where_timeslices_serve(offline: Sharing) -> None:
    assert windows("burst-share", owing("a", 60), owing("b", 20), offline=offline) == [None, None]


@pytest.mark.parametrize(("policy", "expected_us"), [("burst-share", [3950, 1975]), ("best-effort", [3950, 3950])])
def test_a_slice_factor_shortens_one_slice_and_no_gate_moves(policy: str, expected_us: list[int]) -> None:
    found = Sharing(round_ns=8 * NS_PER_MS, slice_factors=(("b", 0.5),))
    plan = POLICIES[policy].plan(Snapshot(0, PERIOD, (owing("a", 50), owing("b")), offline=found))

    assert [part.timeslice_us for part in plan.pods] == pytest.approx(expected_us, rel=0.02)
    assert not plan.gated
    assert plan.offline == (found if policy == "burst-share" else replace(found, slice_factors=()))


def test_best_effort_moves_no_gate_whatever_the_ledger_found() -> None:
    assert windows("best-effort", owing("a"), owing("b")) == [None, None]


#: What is owed in one step of a slice.
STEP_MS = OWED_STEP_NS / NS_PER_MS


def in_round(policy: str, round_ms: float, *pods: Pod) -> list[int]:
    """Return the timeslices in µs by which these take turns in a round so long."""
    sharing = Sharing(round_ns=round(round_ms * NS_PER_MS))
    plan = POLICIES[policy].plan(Snapshot(0, PERIOD, pods, offline=sharing))
    assert plan.offline is not None
    return [part.timeslice_us for part in plan.pods]


@pytest.mark.parametrize(
    ("round_ms", "pods", "expected_us"),
    [
        (9, (owing("a", 60), owing("b", 30)), [6002, 2998]),
        # No slice falls below the shortest that is sensible, and no round is longer than the period.
        (0.6, (owing("a", 60), owing("b", 30)), [1001, 500]),
        (200, (owing("a", 60), owing("b", 30)), [64_914, 32_417]),
        # A pod of several processes has one part, whoever is idle has none.
        (8, (pod("a", 50, tsgs=2), pod("b", 50)), [1998, 4003]),
        (8, (owing("a", 50), pod("b", 50, busy=False)), [48_666, 48_666]),
        # For every step that is owed a slice is a tenth shorter, down to 0.6 of it; for every one due a fifth longer.
        (8, (owing("a", 50, debt_ms=0.9 * STEP_MS), owing("b", 50, debt_ms=-0.9 * STEP_MS)), [4000, 4000]),
        (8, (owing("a", 50, debt_ms=STEP_MS), owing("b", 50, debt_ms=2.9 * STEP_MS)), [3600, 3200]),
        (8, (owing("a", 50, debt_ms=99), owing("b", 50, debt_ms=-STEP_MS)), [2400, 4800]),
        (8, (owing("a", 50), owing("b", 50, debt_ms=-99)), [4000, 7200]),
        # A pod that the round was fitted to has room for the ends of its steps.
        (8, (owing("a", 50)._replace(fits_slice=True), owing("b", 50)), [6000, 4000]),
    ],
)
def test_slices_of_a_round_follow_weights_debts_and_steps(
    round_ms: float, pods: tuple[Pod, ...], expected_us: list[int]
) -> None:
    assert expected_us == in_round("burst-share", round_ms, *pods)


@pytest.mark.parametrize("heavy", [owing("a", 95)._replace(fits_slice=True), owing("a", 95, debt_ms=-99)])
@pytest.mark.parametrize("period_s", [1, 10])
def test_no_slice_of_a_round_is_longer_than_any_may_be(period_s: int, heavy: Pod) -> None:
    period_ns = period_s * NS_PER_S
    snapshot = Snapshot(0, period_ns, (heavy, owing("b", 5)), offline=Sharing(round_ns=9 * period_ns // 10))

    assert max(part.timeslice_us for part in POLICIES["burst-share"].plan(snapshot).pods) <= MAX_TIMESLICE_US


def test_the_drivers_own_slices_are_equal_whatever_the_weights() -> None:
    plan = POLICIES["burst-share"].plan(Snapshot(0, PERIOD, (owing("a", 60), owing("b", 20)), offline=EQUAL))

    assert [part.timeslice_us for part in plan.pods] == [2000, 2000]
    assert [part.weight for part in plan.pods] == [60_000, 20_000]


@pytest.mark.parametrize(("round_ms", "expected_us"), [(1, [2000, 2000]), (8, [4000, 4000])])
def test_best_effort_shortens_no_slice_below_the_drivers_own(round_ms: float, expected_us: list[int]) -> None:
    pods = (owing("a")._replace(fits_slice=True), owing("b", debt_ms=20))

    assert expected_us == in_round("best-effort", round_ms, *pods)


@pytest.mark.parametrize(
    ("pods", "expected_us"),
    [
        # Beside a satisfied pod; of those who take turns one is there at a time, and stands for all.
        ((owing("a", 60), owing("b", 30, satisfied=True)), [2668, 1332]),
        ((owing("a", 40), owing("b", 40), owing("c", 20, satisfied=True)), [2693, 2693, 613]),
        ((pod("a", 60, busy=False), owing("b", 40)), [58_415, 38_916]),
    ],
)
def test_slices_are_short_beside_satisfied_pods(pods: tuple[Pod, ...], expected_us: list[int]) -> None:
    parts = POLICIES["burst-share"].plan(Snapshot(0, PERIOD, pods, offline=BY_GATE)).pods

    assert expected_us == [part.timeslice_us for part in parts]


@pytest.mark.parametrize(
    ("asked", "done"),
    [
        (Sharing(), Sharing()),
        (Sharing(round_ns=6 * NS_PER_MS), Sharing(round_ns=6 * NS_PER_MS)),
        (BY_GATE, BY_GATE),
        (EQUAL, EQUAL),
    ],
)
def test_a_plan_says_how_pods_take_their_turns(asked: Sharing, done: Sharing) -> None:
    plan = POLICIES["burst-share"].plan(Snapshot(0, PERIOD, (owing("a", 60), owing("b", 20)), offline=asked))

    assert plan.offline == done


@pytest.mark.parametrize("asked", [BY_GATE, Sharing(round_ns=NS_PER_MS)], ids=["by gate", "short"])
def test_best_effort_says_that_it_took_the_drivers_own_round(asked: Sharing) -> None:
    plan = POLICIES["best-effort"].plan(Snapshot(0, PERIOD, (owing("a"), owing("b")), offline=asked))

    assert plan.offline == Sharing(round_ns=4 * NS_PER_MS)


@pytest.mark.parametrize("offline", POLICIES)
def test_beside_an_online_pod_nobody_says_how_offline_pods_share(offline: str) -> None:
    pods = (pod("on", online=True), owing("a", 60), owing("b", 20))

    assert compose(offline, "best-effort")(Snapshot(0, PERIOD, pods)).offline is None


@pytest.mark.parametrize(("debt_ms", "end_ms"), [(0, 30), (2, 29.5), (-2, 30.5), (60, 22.5), (-60, 33)])
def test_fixed_share_pays_debts_through_the_window(debt_ms: int, end_ms: float) -> None:
    assert [(0, end_ms)] == windows("fixed-share", owing("a", 30, debt_ms=debt_ms))


@pytest.mark.parametrize(
    ("quotas", "debts_ms", "ends_ms"),
    [
        ((50, 50), (-12, 0), [53, 100]),
        ((50, 50), (-12, -12), [50, 100]),
        ((50, 50), (-12, 100), [53, 90.5]),  # it gives for its own debt already
        ((40, 30, 30), (-12, -4, 0), [43, 74, 100]),
        ((48, 48, 4), (-12, -12, 0), [48.545455, 97.090909, 100]),  # it has little to give
    ],
)
def test_fixed_share_pays_from_windows_of_pods_owed_none(
    quotas: Sequence[int], debts_ms: Sequence[float], ends_ms: Sequence[float]
) -> None:
    pods = [owing(name, cores, debt_ms=ms) for name, cores, ms in zip("abc", quotas, debts_ms, strict=False)]

    assert ends_ms == [window[1] for window in windows("fixed-share", *pods) if window is not None]


def test_fixed_share_leaves_half_a_window_to_a_pod_owed_none() -> None:
    small = [owing(f"p{number}", 1, debt_ms=-12) for number in range(30)]
    start_ms, end_ms = windows("fixed-share", *small, owing("big", 70))[-1] or (0, 0)

    assert end_ms - start_ms >= 35


def test_offline_turns_beside_an_online_pod_are_made_up_for() -> None:
    pods = (pod("on", online=True), owing("a", 50, debt_ms=8), owing("b", 50, debt_ms=-8))
    plan = compose("burst-share", "best-effort")(Snapshot(0, PERIOD, pods))

    assert plan.pods[1].windows == (Window(0, TURN_NS - 2 * NS_PER_MS, OnIdle.YIELD),)


@pytest.mark.parametrize("online", [(), (pod("on", target_ms=500),)])
def test_whose_window_was_lent_gets_a_turn_in_it(online: tuple[Pod, ...]) -> None:
    pods = (*online, *(owing(name, 12) for name in "abcdefgh"))
    plan = compose("burst-share", "best-effort")(Snapshot(0, PERIOD, pods, offline=BY_GATE))
    offline = plan.pods[len(online) :]
    shortest_ns = min(part.windows[0].end_ns - part.windows[0].start_ns for part in offline if part.windows)

    assert sum(OTHER.turn_ns(part.timeslice_us) for part in offline) <= shortest_ns * 0.55


@pytest.mark.parametrize("debt_ms", [1, -1, 5, -5])
def test_debt_of_windowed_online_pod_leaves_offline_slices(debt_ms: int) -> None:
    plan = compose("burst-share", "fixed-share")
    online = pod("online", 1, target_ms=0.768)
    others = (pod("b", 1, tsgs=0), pod("c", 1, tsgs=0), pod("d", 1), pod("e", 1, tsgs=0, online=True), pod("f", 17))
    snapshots = (Snapshot(0, 72_689_159, (online._replace(debt_ns=debt), *others)) for debt in (0, debt_ms * NS_PER_MS))

    calm, owing = ([part.timeslice_us for part in plan(snapshot).pods] for snapshot in snapshots)

    assert calm == owing
