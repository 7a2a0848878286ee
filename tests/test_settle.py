"""What a round settles: debts against what a plan aimed at, and the pace that a pod's turns show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.model import NS_PER_MS, Grant, OnIdle, Pace, PodClass, PodPlan, Window
from qgpu.sched.settle import CREDIT_NS, DEBT_HORIZON_NS, settle
from qgpu.sched.standing import Entry, Standing, Use

MS = NS_PER_MS
PERIOD = 100 * MS


def by_window(
    length_ms: int, run_ms: float, *, open_ms: int | None = None, weight: int = 1, debt_ms: float = 0
) -> Entry:
    """Report a pod that has a window of this length."""
    part = PodPlan("any", PodClass.OFFLINE, 50_000, (Window(0, length_ms * MS, OnIdle.YIELD),), weight)
    use = Use(round(run_ms * MS), 1, (length_ms if open_ms is None else open_ms) * MS)
    return Entry(Grant(), part, use, Standing(round(debt_ms * MS)), 1)


def by_slice(run_ms: float, starts: int, *, slice_us: int = 50_000, weight: int = 1, standing: Standing) -> Entry:
    """Report a pod that shares by timeslices."""
    part = PodPlan("any", PodClass.OFFLINE, slice_us, weight=weight)
    return Entry(Grant(), part, Use(round(run_ms * MS), starts, PERIOD), standing, 1)


def by_quota(run_ms: float, *, debt_ms: float = 0, cores: int = 50) -> Entry:
    """Report a pod of Fixed Share."""
    part = PodPlan("any", PodClass.OFFLINE, 50_000, (Window(0, cores * MS),))
    use = Use(round(run_ms * MS), 1, cores * MS, PERIOD)
    return Entry(Grant(cores=cores), part, use, Standing(round(debt_ms * MS)), 1)


def debts(**entries: Entry) -> dict[str, float]:
    """Settle one round and return debts in ms."""
    return {name: standing.debt_ns / MS for name, standing in settle(entries, PERIOD, PERIOD).items()}


def rounds(number: int, **uses: tuple[float, int, int]) -> dict[str, Pace]:
    """Settle rounds in which pods of equal weight do the same again and again: (run_ms, starts, slice_us)."""
    standings = dict.fromkeys(uses, Standing())
    for _ in range(number):
        entries = {
            name: by_slice(run_ms, starts, slice_us=slice_us, standing=standings[name])
            for name, (run_ms, starts, slice_us) in uses.items()
        }
        standings = settle(entries, PERIOD, PERIOD)
    return {name: standing.pace for name, standing in standings.items()}


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
def test_windows_are_held_to_weights_of_what_was_used(a: Entry, b: Entry, expected: dict[str, float]) -> None:
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
        (by_quota(49, debt_ms=-6), -6),
    ],
)
def test_quotas_are_held_to_the_clock_and_what_is_left_unused_is_gone(entry: Entry, expected: float) -> None:
    assert debts(a=entry)["a"] == expected


def test_a_pod_that_online_work_kept_off_the_card_is_no_idle_pod() -> None:
    online = Entry(Grant(PodClass.ONLINE), None, Use(40 * MS, 100, PERIOD), Standing(), 1)

    assert debts(a=by_window(50, 31), b=by_window(50, 27), service=online)["b"] == -2


def test_a_ragged_round_settles_nothing_among_pods() -> None:
    entries = {"a": by_window(50, 60), "b": by_window(50, 30)}

    assert {s.debt_ns for s in settle(entries, PERIOD // 2, PERIOD, ragged=True).values()} == {0}


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
        assert -CREDIT_NS / MS <= debt["fixed"] <= DEBT_HORIZON_NS / MS / 2


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        # Both use their turns up.
        ({"a": (49.5, 1, 50_000), "b": (49.5, 1, 50_000)}, {"a": Pace.STEADY, "b": Pace.STEADY}),
        # One leaves after 1 ms each time, and is back each time.
        ({"flood": (97.0, 2, 50_000), "short": (2.0, 2, 50_000)}, {"flood": Pace.STEADY, "short": Pace.DOUBTED}),
        # One comes now and then, stays 20 ms and has all it wants: the other runs longer than its timeslice.
        ({"flood": (79.5, 1, 50_000), "rare": (20.0, 1, 50_000)}, {"flood": Pace.STEADY, "rare": Pace.STEADY}),
        # Hardly anything is missed.
        ({"a": (49.8, 2, 25_000), "b": (49.2, 2, 25_000)}, {"a": Pace.STEADY, "b": Pace.STEADY}),
        # The card isn't full, so nobody keeps anybody from anything.
        ({"a": (50.0, 50, 50_000), "b": (10.0, 50, 50_000)}, {"a": Pace.STEADY, "b": Pace.STEADY}),
    ],
)
def test_a_pod_is_doubted_that_comes_short_though_its_turn_always_comes(
    uses: dict[str, tuple[float, int, int]], expected: dict[str, Pace]
) -> None:
    settled = rounds(1 if Pace.DOUBTED in expected.values() else 30, **uses)

    assert expected == settled


@pytest.mark.parametrize(
    ("run_ms", "starts", "expected"), [(75.0, 66, Pace.GAPPY), (20.0, 10, Pace.SPARSE), (0.0, 0, Pace.SPARSE)]
)
def test_short_slices_tell_who_is_back_at_once(run_ms: float, starts: int, expected: Pace) -> None:
    doubted = by_slice(run_ms, starts, standing=Standing(pace=Pace.DOUBTED))
    other = by_slice(95 - run_ms, max(1, starts), slice_us=200, standing=Standing())

    assert settle({"doubted": doubted, "other": other}, PERIOD, PERIOD)["doubted"].pace is expected


def test_a_sparse_pod_that_comes_to_stay_is_steady_again() -> None:
    standings = {"a": Standing(), "b": Standing(pace=Pace.SPARSE)}
    for _ in range(5):
        entries = {name: by_slice(47.5, 24, slice_us=2000, standing=now) for name, now in standings.items()}
        standings = settle(entries, PERIOD, PERIOD)

    assert standings["b"].pace is Pace.STEADY


def test_a_sparse_pod_beside_windows_takes_turns_once_it_uses_more_than_its_part() -> None:
    sparse = by_slice(40, 20, slice_us=2000, standing=Standing(pace=Pace.SPARSE))
    modest = by_slice(10, 20, slice_us=2000, standing=Standing(pace=Pace.SPARSE))

    for entry, expected in ((sparse, Pace.GAPPY), (modest, Pace.SPARSE)):
        entries = {"a": by_window(50, 30), "b": by_window(50, 30), "s": entry}
        assert settle(entries, PERIOD, PERIOD)["s"].pace is expected


@pytest.mark.parametrize(("starts", "expected"), [(1, [Pace.STEADY, Pace.STEADY]), (3, [Pace.DOUBTED])])
def test_who_came_back_within_a_round_is_told_at_once(starts: int, expected: list[Pace]) -> None:
    standings, paces = {"a": Standing(), "b": Standing()}, []
    for _ in expected:
        entries = {
            "a": by_slice(24, starts, slice_us=66_000, weight=2, standing=standings["a"]),
            "b": by_slice(75, starts, slice_us=33_000, weight=1, standing=standings["b"]),
        }
        standings = settle(entries, PERIOD, PERIOD)
        paces.append(standings["a"].pace)

    assert paces == expected


def test_what_a_pod_misses_while_it_starts_does_not_count() -> None:
    for starting, expected in ((True, Pace.STEADY), (False, Pace.DOUBTED)):
        entries = {
            "old": by_slice(95, 3, standing=Standing()),
            "new": by_slice(3, 3, standing=Standing())._replace(starting=starting),
        }
        assert settle(entries, PERIOD, PERIOD)["new"].pace is expected


@pytest.mark.parametrize(("starts", "doubted"), [(45, True), (30, False)])
def test_a_sparse_pod_that_is_always_there_is_doubted_again_also_where_it_is_not_short(
    starts: int, doubted: bool
) -> None:
    """Two wait for batches of 1.36 ms in step: one has whole batches in its turns, the other half of one."""
    standings, paces = {name: Standing(pace=Pace.SPARSE, found=1) for name in "ab"}, set()
    for _ in range(20):
        run_ms = starts * 1.36
        entries = {
            "a": by_slice(run_ms, starts, slice_us=2670, weight=2, standing=standings["a"]),
            "b": by_slice(95 - run_ms, 45, slice_us=1330, standing=standings["b"]),
        }
        standings = settle(entries, PERIOD, PERIOD)
        paces.add(standings["a"].pace)

    assert (Pace.DOUBTED in paces) is doubted


def gate_rounds(number: int, standings: dict[str, Standing]) -> dict[str, Standing]:
    """Let two pods take turns by gate and fill them."""
    for _ in range(number):
        entries = {name: by_window(50, 49)._replace(standing=now) for name, now in standings.items()}
        standings = settle(entries, PERIOD, PERIOD)
    return standings


def probed(standing: Standing, starts: int) -> Standing:
    """Watch a doubted pod for two rounds, in each of which it is there all the time and has so many turns of 50 ms."""
    for _ in range(2):
        doubted = by_slice(min(49.5, starts * 51.3), starts, standing=standing)
        other = by_slice(0.1, 1, slice_us=50, standing=Standing())
        use = doubted.use._replace(open_ns=PERIOD // 2)
        settled = settle({"a": doubted._replace(use=use), "b": other}, PERIOD // 2, PERIOD // 2)
        standing = settled["a"]
    return standing


def test_who_was_not_seen_to_leave_its_turns_is_tried_once_more_and_then_never() -> None:
    found = probed(Standing(pace=Pace.DOUBTED), 1)
    assert (found.pace, found.unproven) == (Pace.GAPPY, True)

    standings = gate_rounds(9, {"a": found, "b": Standing()})
    assert standings["a"].pace is Pace.GAPPY
    acquitted = gate_rounds(1, standings)["a"]
    assert (acquitted.pace, acquitted.acquitted) == (Pace.STEADY, True)

    again = probed(acquitted._replace(pace=Pace.DOUBTED), 1)
    assert gate_rounds(30, {"a": again, "b": Standing()})["a"].pace is Pace.GAPPY


def test_who_was_seen_to_leave_its_turns_is_not_tried_again_nor_anybody_beside_it() -> None:
    proven = probed(Standing(pace=Pace.DOUBTED), 5)
    unproven = probed(Standing(pace=Pace.DOUBTED), 1)
    standings = gate_rounds(30, {"a": proven, "b": unproven})

    assert {standing.pace for standing in standings.values()} == {Pace.GAPPY}


@pytest.mark.parametrize(("length_ms", "ran_ms", "doubted"), [(50, 1, False), (150, 50, False), (100, 1, True)])
def test_a_turn_that_the_ends_of_a_round_cut_off_is_no_miss(length_ms: int, ran_ms: int, doubted: bool) -> None:
    standings, paces = {"a": Standing(), "b": Standing()}, set()
    for all_ms, a_ms in ((100, 50), (100, 40), (length_ms, ran_ms), (100, 50), (100, 50)):
        entries = {
            "a": by_slice(a_ms, 1, standing=standings["a"]),
            "b": by_slice(all_ms - a_ms, 1, standing=standings["b"]),
        }
        standings = settle(entries, all_ms * MS, PERIOD)
        paces.add(standings["a"].pace)

    assert (Pace.DOUBTED in paces) is doubted


def test_who_uses_its_turns_up_is_not_doubted_for_what_another_has_beyond_its_own() -> None:
    """A kernel may be off the engine a millisecond late at the end of every slice."""
    uses = {"a": (36.5, 14, 2_500), "b": (61.0, 14, 3_000)}

    assert [rounds(number, **uses)["a"] for number in range(1, 12)] == [Pace.STEADY] * 11


def test_who_leaves_its_turns_is_doubted_also_beside_one_that_has_more_than_its_own() -> None:
    assert rounds(1, a=(31.0, 14, 2_500), b=(55.0, 14, 3_000)) == {"a": Pace.DOUBTED, "b": Pace.STEADY}
