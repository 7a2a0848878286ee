"""Memory turns: examples that a reader can compute by hand, and what holds for any pods that come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qgpu.model import NS_PER_S, PodClass
from qgpu.policies import memory_turns
from qgpu.policies.memory_turns import GIB, HOLD_NS, MOVING_PART, TURN_NS, Pace, Place, PodMemory
from tests.memory_simulation import MemorySimulation
from tests.simulation import MORE

PACE = Pace()
LONG_NS, STEP_NS = 3600 * NS_PER_S, 10 * NS_PER_S
OFFLINE, ONLINE = PodClass.OFFLINE, PodClass.ONLINE


def on(name: str, size: int, **how: Any) -> PodMemory:
    """Return an offline pod that has been on the card for an hour and uses all of its limit."""
    made: dict[str, Any] = {"limit": size * GIB, "used": size * GIB, "stay_ns": LONG_NS} | how
    return PodMemory(name, made.pop("pod_class", OFFLINE), Place.ON, **made)


def off(name: str, size: int, **how: Any) -> PodMemory:
    """Return an offline pod that yielded an hour ago."""
    made: dict[str, Any] = {"limit": size * GIB, "away": size * GIB, "stay_ns": LONG_NS} | how
    return PodMemory(name, made.pop("pod_class", OFFLINE), Place.OFF, **made)


def decide(*pods: PodMemory, capacity: int = 100) -> tuple[tuple[str, ...], tuple[str, ...]]:
    found = memory_turns.decide(capacity * GIB, pods, PACE)
    return found.leave, found.come


def test_pods_that_fit_together_are_left_alone() -> None:
    assert decide(on("a", 60), on("b", 40)) == ((), ())


def test_the_coldest_pod_yields_to_an_online_pod() -> None:
    cold, colder = on("cold", 40, idle_ns=60 * NS_PER_S), on("colder", 40, idle_ns=90 * NS_PER_S)
    web = on("web", 20, used=0, stay_ns=0, pod_class=ONLINE)
    assert decide(on("warm", 20), cold, colder, web) == (("colder",), ())


def test_no_more_yield_than_an_online_pod_needs() -> None:
    small, large = on("small", 10, idle_ns=90 * NS_PER_S), on("large", 60, idle_ns=60 * NS_PER_S)
    web = on("web", 50, used=0, stay_ns=0, pod_class=ONLINE)
    assert decide(small, large, web) == (("large",), ())


def test_a_turn_that_has_just_begun_ends_for_an_online_pod() -> None:
    web = on("web", 20, used=0, stay_ns=0, pod_class=ONLINE)
    assert decide(on("a", 90, stay_ns=0), web) == (("a",), ())


def test_nobody_comes_while_others_are_still_leaving() -> None:
    leaving = PodMemory("a", OFFLINE, Place.LEAVING, 60 * GIB, used=60 * GIB, charged_ns=1)
    assert decide(leaving, off("b", 60)) == ((), ())


def test_a_waiting_pod_takes_the_turn_of_who_was_charged_more() -> None:
    assert decide(on("a", 60, charged_ns=1), off("b", 60)) == (("a",), ())
    assert decide(on("a", 60), off("b", 60, charged_ns=1)) == ((), ())


def test_a_turn_lasts_in_proportion_to_what_moving_costs() -> None:
    assert memory_turns.turn_ns(on("small", 1), PACE) == TURN_NS
    big = on("big", 60, charged_ns=1)
    moving_ns = 60 * (PACE.off_ns_per_gib + PACE.back_ns_per_gib)
    lasts_ns = int(moving_ns * (1 / MOVING_PART - 1))
    assert memory_turns.turn_ns(big, PACE) == lasts_ns > TURN_NS
    assert decide(on("big", 60, charged_ns=1, stay_ns=lasts_ns - 1), off("b", 60)) == ((), ())
    assert decide(on("big", 60, charged_ns=1, stay_ns=lasts_ns), off("b", 60)) == (("big",), ())


def test_an_idle_pod_gives_its_turn_to_one_that_waits() -> None:
    assert decide(on("idle", 60, idle_ns=60 * NS_PER_S), off("b", 60, charged_ns=1)) == (("idle",), ())


def test_who_yielded_does_not_come_back_at_once() -> None:
    assert decide(off("a", 1, stay_ns=HOLD_NS)) == ((), ())
    assert decide(off("a", 1, stay_ns=HOLD_NS + NS_PER_S)) == ((), ("a",))
    assert decide(off("new", 1, away=0, stay_ns=0)) == ((), ("new",)), "it has nothing to bring back"


def test_held_pods_are_left_alone_and_count() -> None:
    by_hand, stuck = off("hand", 50, held=True), on("stuck", 50, held=True, charged_ns=9)
    assert decide(by_hand, stuck, off("b", 60)) == ((), ())
    assert decide(by_hand, stuck, off("b", 50)) == ((), ("b",))


def test_an_online_pod_that_asks_to_come_back_gets_its_room() -> None:
    assert decide(on("a", 80), off("web", 40, pod_class=ONLINE)) == (("a",), ())
    assert decide(off("a", 80, charged_ns=1), off("web", 40, pod_class=ONLINE)) == ((), ("web",))


def test_a_small_pod_overtakes_only_where_the_first_still_fits() -> None:
    young, big = on("young", 50, stay_ns=9), off("big", 80, away=0, stay_ns=8)
    assert decide(young, big, off("small", 20, charged_ns=1)) == ((), ("small",))
    assert decide(young, big, off("small", 30, charged_ns=1)) == ((), ())
    after = on("young", 50, stay_ns=7)
    assert decide(after, big, off("small", 20, charged_ns=1)) == ((), ()), "with one that came since, it would not fit"


def test_missing_room_is_told_until_it_is_there() -> None:
    web = on("web", 20, used=0, stay_ns=0, pod_class=ONLINE)
    leaving = PodMemory("a", OFFLINE, Place.LEAVING, 90 * GIB, used=90 * GIB)
    assert memory_turns.decide(100 * GIB, [leaving, web], PACE).short == 10 * GIB


def test_two_pods_that_do_not_fit_share_by_quota() -> None:
    simulation = MemorySimulation(100 * GIB, step_ns=STEP_NS)
    simulation.add("two", 60 * GIB, cores=40)
    simulation.add("one", 60 * GIB, cores=20)
    simulation.run(40_000)

    assert simulation.pods["two"].on_ns / simulation.pods["one"].on_ns == pytest.approx(2, rel=0.1)
    assert sum(pod.on_ns for pod in simulation.pods.values()) / simulation.now_ns >= 1 - float(MOVING_PART) - 0.01


PODS = st.lists(
    st.tuples(st.integers(1, 100), st.integers(0, 100), st.sampled_from([None, 5, 10, 20])), min_size=1, max_size=6
)
ONLINES = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 60), st.integers(1, 1500)), max_size=4)


def played(
    pods: list[tuple[int, int, int | None]],
    onlines: list[tuple[int, int, int]],
    seconds: int,
    watch: Callable[[MemorySimulation, memory_turns.Moves], None],
) -> MemorySimulation:
    """Run pods (limit in GiB, per cent of it used, quota) beside online pods (start, limit, length)."""
    simulation = MemorySimulation(100 * GIB, step_ns=STEP_NS)
    for number, (limit, used, cores) in enumerate(pods):
        simulation.add(f"pod{number}", limit * GIB, limit * GIB * used // 100, cores)
    coming = dict(enumerate(onlines))
    ends: dict[str, int] = {}
    while simulation.now_ns < seconds * NS_PER_S:
        now_s = simulation.now_ns // NS_PER_S
        for number, (start_s, limit, length_s) in list(coming.items()):
            there = sum(pod.seen.size for pod in simulation.pods.values() if pod.seen.pod_class is ONLINE)
            if start_s <= now_s and there + limit * GIB <= simulation.capacity:  # admission
                simulation.add(f"web{number}", limit * GIB, pod_class=ONLINE)
                ends[f"web{number}"] = now_s + length_s
                del coming[number]
        for name in [name for name, end_s in ends.items() if end_s <= now_s]:
            simulation.remove(name)
            del ends[name]
        watch(simulation, simulation.step())
    return simulation


@settings(max_examples=25 * MORE)
@given(PODS, ONLINES)
def test_the_card_is_never_beyond_its_memory(
    pods: list[tuple[int, int, int | None]], onlines: list[tuple[int, int, int]]
) -> None:
    def watch(simulation: MemorySimulation, moves: memory_turns.Moves) -> None:
        begun = [pod.seen for pod in simulation.pods.values() if pod.begun or pod.seen.pod_class is OFFLINE]
        assert sum(pod.present for pod in begun) <= simulation.capacity
        names = [pod.seen.name for pod in simulation.pods.values() if pod.seen.pod_class is ONLINE]
        assert not set(names) & {*moves.leave, *moves.come}, "online pods never yield"

    played(pods, onlines, 4000, watch)


@settings(max_examples=25 * MORE)
@given(PODS, ONLINES)
def test_online_pods_begin_once_memory_was_moved_off(
    pods: list[tuple[int, int, int | None]], onlines: list[tuple[int, int, int]]
) -> None:
    waited: dict[str, int] = {}
    longest_ns = 100 * (PACE.off_ns_per_gib + PACE.back_ns_per_gib) + 4 * STEP_NS  # one may be on its way back

    def watch(simulation: MemorySimulation, _moves: memory_turns.Moves) -> None:
        for name, pod in simulation.pods.items():
            if pod.seen.pod_class is ONLINE and not pod.begun:
                waited[name] = waited.get(name, 0) + simulation.step_ns
                assert waited[name] <= longest_ns

    played(pods, onlines, 4000, watch)


@settings(max_examples=25 * MORE)
@given(PODS)
def test_nobody_starves_and_moving_takes_little(pods: list[tuple[int, int, int | None]]) -> None:
    simulation = played(pods, [], 20_000, lambda _simulation, _moves: None)

    for pod in simulation.pods.values():
        assert pod.on_ns > 0
        came_ns = None
        for at_ns, what in pod.moves:
            if what == "leaving":
                assert came_ns is not None
                assert at_ns - came_ns >= memory_turns.turn_ns(on("x", 0, used=pod.uses), PACE)
            came_ns = at_ns if what == "coming" else None
        assert len(pod.moves) <= 2 * (20_000 * NS_PER_S // TURN_NS + 1)


@settings(max_examples=15 * MORE)
@given(st.lists(st.sampled_from([5, 10, 20, 30]), min_size=2, max_size=5), st.integers(51, 100))
def test_pods_of_one_size_share_time_by_quota(quotas: list[int], size: int) -> None:
    simulation = MemorySimulation(100 * GIB, step_ns=STEP_NS)
    for number, cores in enumerate(quotas):
        simulation.add(f"pod{number}", size * GIB, GIB, cores)
    simulation.run(20_000)

    total_ns = sum(pod.on_ns for pod in simulation.pods.values())
    for pod, cores in zip(simulation.pods.values(), quotas, strict=True):
        due_ns = total_ns * cores / sum(quotas)
        assert abs(pod.on_ns - due_ns) <= 4 * TURN_NS * len(quotas)


@settings(max_examples=25 * MORE)
@given(PODS, st.integers(0, 5))
def test_a_pod_suspended_by_hand_stays_suspended(pods: list[tuple[int, int, int | None]], which: int) -> None:
    name = f"pod{which % len(pods)}"

    simulation = MemorySimulation(100 * GIB, step_ns=STEP_NS)
    for number, (limit, used, cores) in enumerate(pods):
        simulation.add(f"pod{number}", limit * GIB, limit * GIB * used // 100, cores)
    simulation.change(name, away=GIB, held=True)
    simulation.run(2000)
    assert simulation.pods[name].moves == []
