"""Turns of one pod's TSGs: one busy TSG at a time, nobody forgotten, nobody idle in the way of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.errors import InvalidValueError
from qgpu.model import MAX_PERIOD_NS, MIN_TIMESLICE_US, MIN_TSG_TURN_NS, NS_PER_MS, NS_PER_S, PodClass, PodPlan
from qgpu.model.hardware_traits import MIN_PARALLEL_TIMESLICE_US
from qgpu.model.tsg_turns import CHECK_NS, TsgTurns, all_at_once

MS = NS_PER_MS
TURN = 251 * MS
STEP = 5 * MS

#: Tells whether a TSG has work at a time.
Works = Callable[[int, int], bool]


def passing(
    turns: TsgTurns[int], tsgs: int, works: Works, until_ns: int, is_open: Callable[[int], bool] = lambda _: True
) -> Iterator[tuple[int, TsgTurns[int], frozenset[int]]]:
    """Let time pass on a card that open TSGs share evenly; yield the time, the turns and who ran."""
    used = dict.fromkeys(range(tsgs), 0)
    turns = turns.with_tsgs(used)
    before = True
    for now in range(0, until_ns, STEP):
        if is_open(now):
            running = [tsg for tsg in used if tsg not in turns.resting and works(tsg, now)]
            for tsg in running:
                used[tsg] += STEP // len(running)
            yield now, turns, frozenset(running)
            turns = turns.advanced(STEP)
            if turns.check_due:
                turns = turns.checked(used)
        elif before:
            turns = turns.gate_closed()
        before = is_open(now)


def test_busy_tsgs_are_open_one_at_a_time_and_equally_long() -> None:
    ran = [0, 0, 0]
    for now, turns, running in passing(TsgTurns(TURN), 3, lambda _tsg, _now: True, 15 * NS_PER_S):
        if now > 2 * CHECK_NS:
            assert len(turns.resting) == 2
            for tsg in running:
                ran[tsg] += STEP

    assert max(ran) - min(ran) <= 2 * TURN
    assert sum(ran) >= 14 * NS_PER_S


def test_who_is_busy_alone_has_no_gate_moved() -> None:
    for _, turns, _ in passing(TsgTurns(TURN), 4, lambda tsg, _: tsg == 2, 3 * NS_PER_S):
        assert not turns.resting


def test_a_turn_without_work_passes_on_after_a_look() -> None:
    lost = 0
    for now, _, running in passing(TsgTurns(TURN), 3, lambda tsg, now: tsg != 1 or now < NS_PER_S, 10 * NS_PER_S):
        lost += STEP * (not running and now > 0)

    assert lost <= 2 * CHECK_NS


def test_new_work_runs_at_once_and_then_takes_turns() -> None:
    beside = 0
    for now, turns, running in passing(TsgTurns(TURN), 3, lambda tsg, now: tsg or now >= NS_PER_S, 2 * NS_PER_S):
        if now == NS_PER_S:
            assert 0 in running
        elif now > NS_PER_S:
            beside += STEP * (len(running) > 1)
            assert now < NS_PER_S + 2 * CHECK_NS or 0 in turns.busy

    assert beside <= CHECK_NS


def test_turns_go_on_where_online_work_leaves_little() -> None:
    used = dict.fromkeys("ab", 0)
    turns: TsgTurns[str] = TsgTurns(TURN)
    turns = turns.with_tsgs(used)
    for _ in range(40):
        for tsg in set(used) - turns.resting:
            used[tsg] += CHECK_NS // 100
        turns = turns.advanced(CHECK_NS).checked(used)
        assert len(turns.busy) == 2


def test_whose_process_is_gone_has_no_turn_and_a_new_one_is_open() -> None:
    used = dict.fromkeys("abc", 0)
    turns: TsgTurns[str] = TsgTurns(TURN)
    turns = turns.with_tsgs(used).advanced(CHECK_NS).checked(dict.fromkeys("abc", CHECK_NS // 3))
    assert turns.busy == ("a", "b", "c")

    turns = turns.advanced(10 * MS).with_tsgs({"b": 5, "c": 5, "d": 7})
    assert turns.busy == ("b", "c")
    assert turns.resting == {"c"}
    assert turns.until_next_ns == CHECK_NS - 10 * MS


def test_a_turn_that_is_nearly_over_ends_with_the_window() -> None:
    turns = TsgTurns(TURN, ("a", "b"), {"a": 0, "b": 0})

    assert turns.advanced(TURN // 2).gate_closed().busy == ("a", "b")
    assert turns.advanced(TURN - MS).gate_closed().busy == ("b", "a")


@st.composite
def work(draw: st.DrawFn) -> Works:
    """Draw for each TSG how long it works and rests, in turns."""
    spans = [
        (
            draw(st.integers(10, 2000)) * MS,
            draw(st.sampled_from([0, 10, 100, 700])) * MS,
            draw(st.integers(0, 500)) * MS,
        )
        for _ in range(6)
    ]
    return lambda tsg, now: (now + spans[tsg][2]) % (spans[tsg][0] + spans[tsg][1]) < spans[tsg][0]


@given(st.integers(1, 6), st.integers(10, 400), work(), st.integers(20, 500), st.integers(0, 500))
def test_all_with_work_get_turns_and_one_is_open(
    tsgs: int, turn_ms: int, works: Works, window_ms: int, pause_ms: int
) -> None:
    turn_ns, period = turn_ms * MS, (window_ms + pause_ms) * MS
    waited = dict.fromkeys(range(tsgs), 0)
    story = passing(TsgTurns(turn_ns), tsgs, works, 6 * NS_PER_S, lambda now: now % period < window_ms * MS)
    for now, turns, running in story:
        for tsg in waited:
            waited[tsg] = waited[tsg] + STEP if works(tsg, now) and tsg not in running else 0
        assert len(set(turns.busy)) == len(turns.busy)
        assert turns.resting == set(turns.busy[1:])
        assert max(waited.values()) <= tsgs * (turn_ns + STEP) + NS_PER_S // 2


@given(st.integers(2, 6), work())
def test_the_same_story_has_the_same_turns(tsgs: int, works: Works) -> None:
    first, second = ([turns for _, turns, _ in passing(TsgTurns(TURN), tsgs, works, NS_PER_S)] for _ in range(2))

    assert first == second


@pytest.mark.parametrize("turn_ns", [MIN_TSG_TURN_NS - 1, MAX_PERIOD_NS + 1])
def test_turns_out_of_bounds_are_refused(turn_ns: int) -> None:
    with pytest.raises(InvalidValueError, match="turns of"):
        PodPlan("a", PodClass.OFFLINE, 2000, tsg_turn_ns=turn_ns)


@pytest.mark.parametrize(
    ("slice_us", "busy", "expected_us"),
    [
        (MIN_TIMESLICE_US, 1, MIN_TIMESLICE_US),
        (MIN_TIMESLICE_US, 4, MIN_PARALLEL_TIMESLICE_US),
        (1726, 4, 431),
        (1726, 0, 1726),
    ],
)
def test_without_tsg_gates_busy_tsgs_share_one_slice(slice_us: int, busy: int, expected_us: int) -> None:
    part = PodPlan("a", PodClass.OFFLINE, slice_us, tsg_turn_ns=TURN)

    assert all_at_once(part, busy) == replace(part, tsg_turn_ns=None, timeslice_us=expected_us)
    unasked = PodPlan("a", PodClass.OFFLINE, slice_us)
    assert all_at_once(unasked, busy) == unasked


@given(st.integers(2, 400), st.integers(1, 50))
def test_many_tsgs_with_little_work_each_take_turns(number, ran_ms):
    """All together they may run for a twentieth of the time at most without turns."""
    turns = TsgTurns(10 * MS).with_tsgs(dict.fromkeys(range(number), 0)).advanced(CHECK_NS)
    after = turns.checked(dict.fromkeys(range(number), ran_ms * MS // number))

    assert (number - len(after.busy)) * (ran_ms * MS // number) <= CHECK_NS // 20
