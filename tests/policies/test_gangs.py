"""Turns of pods on several pGPUs, against every promise of ``qgpu.policies.gangs``."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from qgpu.model import NS_PER_MS, GangTurn, Grant, Plan, Pod, Snapshot, Tsg, Window
from qgpu.policies.gangs import Bids, agree, bids, gangs_first
from qgpu.policies.registry import POLICIES
from tests.policies.cases import fresh

PERIOD = 100 * NS_PER_MS
policies = st.sampled_from(sorted(POLICIES))
lending = st.sampled_from(sorted(name for name, info in POLICIES.items() if not info.caps))


@st.composite
def racks(draw: st.DrawFn, debts: bool = True) -> list[Snapshot]:
    """Draw up to four pGPUs with up to five pods that may be on several of them."""
    gpus = draw(st.integers(2, 4))
    pods: list[list[Pod]] = [[] for _ in range(gpus)]
    for name in "abcde"[: draw(st.integers(1, 5))]:
        for gpu in draw(st.sets(st.integers(0, gpus - 1), min_size=1)):
            debt_ns = draw(st.integers(-6, 6)) * NS_PER_MS if debts else 0
            busy = draw(st.booleans())
            pods[gpu].append(
                Pod(name, Grant(cores=draw(st.integers(1, 20))), (Tsg(f"{name}/0", busy),), debt_ns=debt_ns)
            )
    return [Snapshot(gpu, PERIOD, tuple(each)) for gpu, each in enumerate(pods)]


def agreed(rack: list[Snapshot], policy: str) -> list[tuple[int, tuple[GangTurn, ...]]]:
    """Let every pGPU ask."""
    every = {snapshot.pgpu: bids(POLICIES[policy].plan(snapshot), snapshot) for snapshot in rack}
    return [agree(every, snapshot.pgpu) for snapshot in rack]


def together(rack: list[Snapshot], policy: str) -> list[tuple[Snapshot, Plan]]:
    """Plan for every pGPU that has turns."""
    met = [
        replace(snapshot, period_ns=period_ns, gang_turns=turns)
        for snapshot, (period_ns, turns) in zip(rack, agreed(rack, policy), strict=True)
        if turns
    ]
    return [(snapshot, gangs_first(POLICIES[policy].plan)(snapshot)) for snapshot in met]


def spans(windows: tuple[Window, ...] | None) -> list[tuple[int, int]]:
    """Return from when to when, in order."""
    return [(window.start_ns, window.end_ns) for window in windows or ()]


@fresh
@given(rack=racks(), policy=policies)
def test_gang_has_same_turn_on_each_contended_pgpu(rack: list[Snapshot], policy: str) -> None:
    by_pod: dict[str, set[tuple[int, GangTurn]]] = {}
    for period_ns, turns in agreed(rack, policy):
        for turn in turns:
            by_pod.setdefault(turn.pod, set()).add((period_ns, turn))

    assert all(len(different) == 1 for different in by_pod.values())


@fresh
@given(rack=racks(), policy=policies)
def test_nobody_else_has_its_turn_in_that_of_a_gang(rack: list[Snapshot], policy: str) -> None:
    for snapshot, plan in together(rack, policy):
        windows = sorted(span for part in plan.pods for span in spans(part.windows))
        assert all(before[1] <= after[0] for before, after in pairwise(windows))
        planned = {part.pod: spans(part.windows) for part in plan.pods}
        assert all(planned[turn.pod] == [(turn.start_ns, turn.end_ns)] for turn in snapshot.gang_turns)


@fresh
@given(rack=racks(debts=False), policy=policies)
def test_others_have_at_least_their_own_share_beside_gangs(rack: list[Snapshot], policy: str) -> None:
    for snapshot, plan in together(rack, policy):
        own = bids(POLICIES[policy].plan(snapshot), snapshot).pods
        gangs = {turn.pod for turn in snapshot.gang_turns}
        for part in plan.pods:
            if part.pod in own and part.pod not in gangs:
                length_ns = sum(end - start for start, end in spans(part.windows))
                assert length_ns >= 0.9 * own[part.pod].part * snapshot.period_ns - 1


@fresh
@given(rack=racks(), policy=policies)
def test_every_busy_pod_has_a_turn_whatever_is_owed(rack: list[Snapshot], policy: str) -> None:
    for snapshot, plan in together(rack, policy):
        for part, pod in zip(plan.pods, snapshot.pods, strict=True):
            if pod.busy:
                assert part.windows is None or spans(part.windows)


@fresh
@given(rack=racks(), policy=lending)
def test_idle_pod_beside_gangs_has_no_gate_unless_quota_caps(rack: list[Snapshot], policy: str) -> None:
    for snapshot, plan in together(rack, policy):
        assert all(part.windows is None for part, pod in zip(plan.pods, snapshot.pods, strict=True) if not pod.busy)


def test_the_least_that_a_pgpu_would_give_is_what_a_gang_gets() -> None:
    one, two = (_snapshot(gpu, ["g", *rivals]) for gpu, rivals in enumerate((["x"], ["y", "z", "w"])))
    every = {snapshot.pgpu: bids(POLICIES["best-effort"].plan(snapshot), snapshot) for snapshot in (one, two)}

    assert agree(every, 0) == agree(every, 1) == (500 * NS_PER_MS, (GangTurn("g", 0, 125_000_000, 125_000_000),))


def test_gangs_without_common_turn_share_the_period() -> None:
    rack = [_snapshot(gpu, names) for gpu, names in enumerate(("ab", "bc", "ca"))]
    turns = {turn for _, each in agreed(rack, "best-effort") for turn in each}

    assert sorted(turn.pod for turn in turns) == ["a", "b", "c"]
    for one, other in combinations(turns, 2):
        assert one.end_ns <= other.start_ns or other.end_ns <= one.start_ns
    assert {turn.end_ns - turn.start_ns for turn in turns} <= {66_666_666, 66_666_667}


def test_what_all_pgpus_of_a_gang_owe_it_is_paid_on_all() -> None:
    rack = [
        replace(snapshot, pods=tuple(pod._replace(debt_ns=debt_ns) for pod in snapshot.pods if pod.name == "g") + rest)
        for snapshot, debt_ns in ((_snapshot(0, "gx"), -3 * NS_PER_MS), (_snapshot(1, "gy"), -5 * NS_PER_MS))
        for rest in (snapshot.pods[1:],)
    ]
    (period_ns, (turn,)), same = agreed(rack, "best-effort")

    assert same == (period_ns, (turn,))
    assert turn == GangTurn("g", 0, 101 * NS_PER_MS, 100 * NS_PER_MS)


def test_a_pod_on_several_pgpus_that_has_no_rivals_is_left_alone() -> None:
    every = {gpu: bids(POLICIES["burst-share"].plan(s := _snapshot(gpu, "g")), s) for gpu in (0, 1)}

    assert agree(every, 0) == (0, ())
    assert agree({0: Bids(PERIOD)}, 0) == (0, ())


def _snapshot(gpu: int, names: list[str] | str) -> Snapshot:
    return Snapshot(gpu, PERIOD, tuple(Pod(name, tsgs=(Tsg(f"{name}/0", busy=True),)) for name in names))
