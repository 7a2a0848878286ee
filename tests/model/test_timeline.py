"""A plan on the clock: whose gates are closed when, and when that changes next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.model import OnIdle, Plan, PodClass, PodPlan, Snapshot, Window
from qgpu.model.timeline import Timeline
from qgpu.policies.registry import POLICIES, compose
from tests.strategies import snapshots

MS = 1_000_000


def part(name: str, *windows: tuple[int, int], on_idle: OnIdle = OnIdle.YIELD) -> PodPlan:
    """Plan a pod with windows given in ms."""
    laid = tuple(Window(start * MS, end * MS, on_idle) for start, end in windows)
    return PodPlan(name, PodClass.OFFLINE, 1000, laid)


def timeline(*parts: PodPlan) -> Timeline:
    """Lay parts on a period of 100 ms."""
    return Timeline(Plan(0, 100 * MS, parts))


@pytest.mark.parametrize(
    ("phase", "idle", "expected"),
    [
        (0, "", "b"),
        (49, "", "b"),
        (50, "", "a"),
        (99, "", "a"),
        (0, "a", ""),
        (0, "b", "b"),
        (0, "ab", ""),
    ],
)
def test_a_window_that_yields_is_lent_while_its_pod_is_idle(phase: int, idle: str, expected: str) -> None:
    laid = timeline(part("a", (0, 50)), part("b", (50, 100)))

    assert set(expected) == laid.closed(phase * MS, set(idle))


def test_a_window_that_keeps_is_lent_to_nobody() -> None:
    laid = timeline(part("a", (0, 50), on_idle=OnIdle.KEEP), part("b", (50, 100)))

    assert laid.closed(0, {"a"}) == {"b"}


def test_nobody_borrows_who_keeps_his_own() -> None:
    laid = timeline(part("a", (0, 50)), part("b", (50, 100), on_idle=OnIdle.KEEP))

    assert laid.closed(0, {"a"}) == {"b"}


def test_time_nobody_owns_is_lent_to_nobody() -> None:
    assert timeline(part("a", (0, 30))).closed(50 * MS) == {"a"}


def test_no_windows_field_never_closed_empty_windows_always() -> None:
    laid = timeline(PodPlan("open", PodClass.OFFLINE, 1000), part("shut"))

    assert laid.closed(0) == {"shut"}


def test_a_plan_without_gates_never_wakes_anybody() -> None:
    assert timeline(PodPlan("open", PodClass.OFFLINE, 1000)).until_next(0) is None


@pytest.mark.parametrize(("phase", "expected"), [(0, 30), (29, 1), (30, 20), (50, 50), (99, 1)])
def test_the_next_edge_is_the_next_change_or_the_periods_end(phase: int, expected: int) -> None:
    assert timeline(part("a", (0, 30)), part("b", (30, 50))).until_next(phase * MS) == expected * MS


@given(
    snapshot=snapshots(everybody=True),
    offline=st.sampled_from(sorted(POLICIES)),
    online=st.sampled_from(sorted(POLICIES)),
    fraction=st.floats(0, 1, exclude_max=True),
)
def test_gates_stand_still_between_edges(snapshot: Snapshot, offline: str, online: str, fraction: float) -> None:
    laid = Timeline(compose(offline, online)(snapshot))
    period_ns = laid.plan.period_ns
    phase = int(fraction * period_ns)
    until = laid.until_next(phase)

    last = period_ns if until is None else phase + until
    assert phase < last <= period_ns
    assert laid.closed(phase) == laid.closed(last - 1)


def test_slow_gate_starts_closing_earlier_by_its_delay() -> None:
    laid = timeline(part("a", (0, 50)), part("b", (50, 100)))
    early = {"a": 15 * MS}

    assert laid.closed(34 * MS, early=early) == {"b"}
    assert laid.closed(35 * MS, early=early) == {"a", "b"}
    assert laid.closed(50 * MS, early=early) == {"a"}
    assert [laid.until_next(at * MS, early) for at in (0, 35, 50)] == [35 * MS, 15 * MS, 50 * MS]


def test_pod_keeps_half_its_window_however_slow_its_gate_is() -> None:
    assert timeline(part("a", (0, 50)), part("b", (50, 100))).closed(24 * MS, early={"a": 90 * MS}) == {"b"}


def test_a_gate_that_stays_open_does_not_close_early() -> None:
    laid = timeline(part("a", (0, 20), (20, 50), (90, 100)), part("b", (50, 90)))
    early = {"a": 5 * MS}

    assert [at for at in range(100) if "a" in laid.closed(at * MS, early=early)] == list(range(45, 90))


def test_no_early_close_when_next_turn_is_lent_to_same_pod() -> None:
    laid = timeline(part("a", (0, 50)), part("b", (50, 100)))
    early = {"a": 20 * MS}

    assert laid.closed(40 * MS, {"b"}, early) == {"b"}
    assert laid.closed(40 * MS, set(), early) == {"a", "b"}


@given(
    snapshot=snapshots(everybody=True),
    offline=st.sampled_from(sorted(POLICIES)),
    fraction=st.floats(0, 1, exclude_max=True),
    early_ms=st.integers(0, 60),
)
def test_closing_early_opens_nothing(snapshot: Snapshot, offline: str, fraction: float, early_ms: int) -> None:
    plan = compose(offline, "best-effort")(snapshot)
    laid = Timeline(plan)
    early = {pod.pod: early_ms * MS for pod in plan.pods}
    phase = int(fraction * plan.period_ns)
    until = laid.until_next(phase, early)

    assert laid.closed(phase) <= laid.closed(phase, early=early)
    if until is not None:
        assert 0 < until <= (laid.until_next(phase) or 0)
        assert laid.closed(phase, early=early) == laid.closed(phase + until - 1, early=early)


@pytest.mark.parametrize(
    ("phase", "expected"),
    [(0, 0), (5, 78), (50, 33), (81, 2), (85, 0), (99, 0)],
    ids=["own begins", "own too short", "other's", "other's just closed", "free before own", "free and own"],
)
def test_gates_are_delayed_when_no_other_window_pays(phase: int, expected: int) -> None:
    """Of 40 ms: in the pod's own 40, or in the 20 of nobody before them."""
    laid = timeline(part("a", (0, 40)), part("b", (40, 80)))

    assert laid.until_lock_fits("a", phase * MS, 40 * MS) == expected * MS


def test_a_delay_too_long_for_any_place_begins_in_own_window() -> None:
    laid = timeline(part("a", (0, 20)), part("b", (20, 100)))

    assert laid.until_lock_fits("a", 50 * MS, 45 * MS) == 53 * MS


def test_without_gates_nothing_waits_for_a_turn() -> None:
    assert timeline(PodPlan("a", PodClass.OFFLINE, 1000)).until_lock_fits("a", 5 * MS, 45 * MS) == 0


@given(
    snapshot=snapshots(everybody=True),
    offline=st.sampled_from(sorted(POLICIES)),
    fraction=st.floats(0, 1, exclude_max=True),
    other=st.floats(0, 1, exclude_max=True),
    held_ms=st.integers(1, 60),
)
def test_no_other_moment_of_a_period_costs_less(
    snapshot: Snapshot, offline: str, fraction: float, other: float, held_ms: int
) -> None:
    plan = compose(offline, "best-effort")(snapshot)
    laid, period_ns = Timeline(plan), plan.period_ns
    phase = int(fraction * period_ns)

    def cost(begin_ns: int, pod: str) -> int:
        """Count the ticks of others' windows in the delay."""
        tick = period_ns // 1000
        ticks = range(begin_ns - 3 * MS, begin_ns + held_ms * MS, tick)
        windows = [window for each in plan.pods if each.pod != pod for window in each.windows or ()]
        return sum(window.start_ns <= at % period_ns < window.end_ns for at in ticks for window in windows)

    for each in plan.pods:
        wait = laid.until_lock_fits(each.pod, phase, held_ms * MS)
        assert 0 <= wait < period_ns
        windows = 2 * sum(len(other.windows or ()) for other in plan.pods)
        assert cost(phase + wait, each.pod) <= cost(phase + int(other * period_ns), each.pod) + 2 * windows
