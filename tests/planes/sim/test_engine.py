"""The compute engine: turns, switches, preemption and gates, to the nanosecond."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qgpu.model import NS_PER_MS, NS_PER_S, NS_PER_US
from qgpu.planes.sim.engine import FOREVER_NS, Engine, Gate, Tsg
from qgpu.planes.sim.hardware import H200

SWITCH = H200.switch_ns
SECOND = NS_PER_S


def engine_of(*timeslices_us: int, work_ns: int = FOREVER_NS) -> tuple[Engine, list[Tsg]]:
    engine = Engine(H200)
    tsgs = [Tsg(f"tsg{i}", Gate(), timeslice_us) for i, timeslice_us in enumerate(timeslices_us)]
    for tsg in tsgs:
        engine.add(tsg)
        if work_ns:
            tsg.launch(work_ns)
    return engine, tsgs


def run(engine: Engine, until_ns: int) -> None:
    while engine.now_ns < until_ns:
        engine.run(until_ns)


@pytest.mark.parametrize("timeslice_us", [1, 50, 2048, 1_000_000])
def test_a_tsg_alone_pays_for_nothing_but_coming_on(timeslice_us: int) -> None:
    engine, (tsg,) = engine_of(timeslice_us)

    run(engine, SECOND)

    assert tsg.useful_ns == SECOND - SWITCH


def test_two_tsgs_take_turns_of_their_timeslices() -> None:
    engine, (first, second) = engine_of(2000, 1000)
    turns = [H200.turn_ns(2000), H200.turn_ns(1000)]

    run(engine, 10 * (sum(turns) + 2 * SWITCH))

    assert [first.useful_ns, second.useful_ns] == [10 * turn for turn in turns]
    assert [first.starts, second.starts] == [10, 10]


@pytest.mark.parametrize("rounds", [1, 3, 1000])
def test_the_longest_turn_is_a_whole_one_with_its_switches(rounds: int) -> None:
    engine, tsgs = engine_of(2000, 1000)
    turns = [H200.turn_ns(2000), H200.turn_ns(1000)]

    run(engine, rounds * (sum(turns) + 2 * SWITCH) + SWITCH)

    assert [tsg.longest_ns for tsg in tsgs] == [turn + H200.save_ns + H200.restore_ns for turn in turns]


def test_a_turn_left_early_is_told_as_long_as_it_was() -> None:
    engine, (brief, flood) = engine_of(2000, 1000, work_ns=0)
    brief.launch(100 * NS_PER_US)
    flood.launch(FOREVER_NS)

    run(engine, SECOND)

    assert brief.longest_ns == 100 * NS_PER_US + H200.save_ns + H200.restore_ns


def test_newcomer_waits_only_until_the_running_slice_ends() -> None:
    engine, (running, newcomer) = engine_of(1000, 1_000_000, work_ns=0)
    turn = H200.turn_ns(1000)
    running.launch(FOREVER_NS)
    run(engine, SWITCH + 10 * turn + 1)
    newcomer.launch(5)
    finished: list[int] = []
    newcomer.finished = finished.append

    run(engine, SECOND)

    assert finished == [SWITCH + 11 * turn + SWITCH + 5]


def test_a_tsg_that_runs_dry_is_passed_over_at_once() -> None:
    engine, (dry, busy) = engine_of(1_000_000, 2048, work_ns=0)
    dry.launch(10)
    busy.launch(FOREVER_NS)

    run(engine, SECOND)

    assert dry.useful_ns == 10
    assert busy.useful_ns == SECOND - SWITCH - 10 - SWITCH


def test_kernel_longer_than_a_slice_resumes_where_preempted() -> None:
    engine, (long, _) = engine_of(1000, 1000, work_ns=0)
    turn = H200.turn_ns(1000)
    long.launch(3 * turn + 7)
    engine.runlist[1].launch(FOREVER_NS)
    finished: list[int] = []
    long.finished = finished.append

    run(engine, SECOND)

    assert finished == [SWITCH + 3 * turn + 3 * (2 * SWITCH + turn) + 7]


def test_a_launch_that_fills_its_last_slice_is_done_with_it() -> None:
    engine, (exact, _) = engine_of(1000, 1000, work_ns=0)
    turn = H200.turn_ns(1000)
    exact.launch(3 * turn)
    engine.runlist[1].launch(FOREVER_NS)
    finished: list[int] = []
    exact.finished = finished.append

    run(engine, SECOND)

    assert finished == [SWITCH + 3 * turn + 2 * (2 * SWITCH + turn)]


def test_the_next_in_line_follows_a_tsg_that_dies_in_its_turn() -> None:
    engine, (dying, following, last) = engine_of(2000, 2000, 2000)
    run(engine, SWITCH + 10)
    engine.remove(dying)

    run(engine, engine.now_ns + SWITCH + 10)

    assert (following.useful_ns, last.useful_ns) == (10, 0)


def test_launches_are_done_in_order_and_each_is_told() -> None:
    engine, (tsg,) = engine_of(2048, work_ns=0)
    finished: list[int] = []
    tsg.finished = finished.append
    for work_ns in (30, 10, 20):
        tsg.launch(work_ns)

    run(engine, NS_PER_MS)

    assert finished == [SWITCH + 30, SWITCH + 40, SWITCH + 60]


def test_closed_gate_stops_tsg_at_once_and_open_one_resumes_it() -> None:
    engine, (gated, other) = engine_of(2048, 2048)
    run(engine, SECOND)
    before = gated.useful_ns
    gated.gate.open = False
    run(engine, 2 * SECOND)

    assert gated.useful_ns == before
    assert other.useful_ns > 1.4 * SECOND

    gated.gate.open = True
    run(engine, 3 * SECOND)

    assert gated.useful_ns > before + 0.4 * SECOND


def test_timeslice_below_restore_time_gets_no_work_done() -> None:
    engine, (tiny, other) = engine_of(1, 2000)

    run(engine, SECOND)

    assert tiny.useful_ns == 0
    assert other.useful_ns > 0.8 * SECOND


@pytest.mark.parametrize("removed_ns", [SWITCH // 2, SWITCH + NS_PER_MS])
def test_a_tsg_that_moves_works_on_one_engine_only(removed_ns: int) -> None:
    before, (tsg,) = engine_of(2000)
    after, _ = engine_of()
    run(before, removed_ns)
    before.remove(tsg)
    worked_ns = before.useful_ns
    after.add(tsg)
    tsg.launch(FOREVER_NS)

    run(after, SECOND)
    run(before, SECOND)

    assert (before.useful_ns, after.useful_ns) == (worked_ns, SECOND - SWITCH)


def test_a_removed_tsg_leaves_the_engine_to_the_rest() -> None:
    engine, (gone, *rest) = engine_of(2000, 2000, 2000)
    run(engine, SECOND)
    engine.remove(gone)
    before = [tsg.useful_ns for tsg in rest]

    run(engine, 2 * SECOND)

    gained = [tsg.useful_ns - was for tsg, was in zip(rest, before, strict=True)]
    assert gained == pytest.approx([SECOND * 1967 // (2 * 2162)] * 2, rel=0.01)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int, str, int]]]:
    """Draw timeslices, and what happens when: (after ns, to whom, what, how much)."""
    timeslices = draw(st.lists(st.one_of(st.just(1), st.integers(50, 20_000)), min_size=1, max_size=4))
    happening = st.tuples(
        st.integers(0, 30 * NS_PER_MS),
        st.integers(0, len(timeslices) - 1),
        st.sampled_from(["launch", "flood", "close", "open", "timeslice", "remove"]),
        st.integers(1, 20_000),
    )
    return timeslices, draw(st.lists(happening, max_size=12))


def play(timeslices: list[int], happenings: list[tuple[int, int, str, int]], step_ns: int) -> tuple[Engine, list[Tsg]]:
    """Run a history, looking at the engine every ``step_ns``."""
    engine, tsgs = engine_of(*timeslices, work_ns=0)

    def pass_time(until_ns: int) -> None:
        while engine.now_ns < until_ns:
            engine.run(min(until_ns, (engine.now_ns // step_ns + 1) * step_ns))

    for after_ns, whom, what, number in happenings:
        pass_time(engine.now_ns + after_ns)
        tsg = tsgs[whom]
        if tsg not in engine.runlist:
            continue
        match what:
            case "launch":
                tsg.launch(number * NS_PER_US)
            case "flood":
                tsg.launch(FOREVER_NS)
            case "close" | "open":
                tsg.gate.open = what == "open"
            case "timeslice":
                tsg.timeslice_us = number
            case "remove":
                engine.remove(tsg)
    pass_time(engine.now_ns + 100 * NS_PER_MS)
    return engine, tsgs


@given(histories())
def test_no_time_is_lost_or_made(history: tuple[list[int], list[tuple[int, int, str, int]]]) -> None:
    engine, tsgs = play(*history, step_ns=SECOND)

    assert sum(tsg.run_ns for tsg in tsgs) + engine.gap_ns + engine.idle_ns == engine.now_ns
    assert engine.times.useful_ns == sum(tsg.useful_ns for tsg in tsgs)
    assert engine.times.useful_ns + engine.times.switching_ns + engine.times.idle_ns == engine.now_ns
    assert min(engine.times.switching_ns, engine.idle_ns, engine.gap_ns, *(tsg.useful_ns for tsg in tsgs)) >= 0


@settings(deadline=None)
@given(histories(), st.integers(10 * NS_PER_US, NS_PER_MS))
def test_looking_more_often_changes_nothing(
    history: tuple[list[int], list[tuple[int, int, str, int]]], step_ns: int
) -> None:
    """Short steps leave no room for skipping rounds, so this is also the proof that skipping is exact."""
    at_once, tsgs_at_once = play(*history, step_ns=SECOND)
    stepped, tsgs_stepped = play(*history, step_ns=step_ns)

    assert [(t.useful_ns, t.run_ns, t.starts, t.left_ns) for t in tsgs_at_once] == [
        (t.useful_ns, t.run_ns, t.starts, t.left_ns) for t in tsgs_stepped
    ]
    assert (at_once.times, at_once.switches) == (stepped.times, stepped.switches)


@given(st.lists(st.integers(50, 20_000), min_size=1, max_size=8))
def test_no_tsg_with_work_starves(timeslices: list[int]) -> None:
    engine, tsgs = engine_of(*timeslices)
    rounds_ns = sum(timeslice_us * NS_PER_US + SWITCH for timeslice_us in timeslices)

    run(engine, 2 * rounds_ns)

    assert all(tsg.useful_ns >= H200.turn_ns(tsg.timeslice_us) for tsg in tsgs)


@given(histories())
def test_a_closed_gate_lets_nothing_through(history: tuple[list[int], list[tuple[int, int, str, int]]]) -> None:
    engine, tsgs = play(*history, step_ns=SECOND)
    for tsg in tsgs:
        tsg.gate.open = False
    before = [tsg.useful_ns for tsg in tsgs]

    run(engine, engine.now_ns + SECOND)

    assert [tsg.useful_ns for tsg in tsgs] == before


def test_an_idle_context_is_charged_while_others_are_gated() -> None:
    engine, (first, second) = engine_of(2000, 2000, work_ns=0)
    first.launch(NS_PER_MS)
    second.launch(FOREVER_NS)
    second.gate.open = False

    run(engine, 10 * NS_PER_MS)

    assert first.useful_ns == NS_PER_MS
    assert first.run_ns == 10 * NS_PER_MS - H200.save_ns - H200.gap_ns
    assert engine.times.idle_ns == 10 * NS_PER_MS - SWITCH - NS_PER_MS
