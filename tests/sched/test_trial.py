"""What a trial tells of pods' work, and what each pod is due of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from qgpu.model import NS_PER_MS, Grant, PodClass, PodPlan, Sharing, Window
from qgpu.model.hardware_traits import OTHER
from qgpu.sched.gpu_usage import GpuUse, RoundEntry
from qgpu.sched.trial import Trial, dues, observe, score


def entries(cores: Mapping[str, int | None], weights: Mapping[str, int]) -> dict[str, RoundEntry]:
    """Return busy pods with these quotas and weights."""
    return {
        name: RoundEntry(
            Grant(cores=quota), PodPlan(name, PodClass.OFFLINE, 2000, weight=weights[name]), GpuUse(), 0, 1
        )
        for name, quota in cores.items()
    }


@pytest.mark.parametrize(
    ("cores", "weights", "done", "due"),
    [
        ({"a": 60, "guest": None}, {"a": 60, "guest": 40}, 0.9, {"a": 0.6, "guest": 0.3}),
        ({"a": 60, "guest": None}, {"a": 60, "guest": 40}, 0.5, {"a": 0.5, "guest": 0.0}),
        (
            {"a": 50, "b": 25, "c": None, "d": None},
            {"a": 100, "b": 50, "c": 25, "d": 25},
            0.95,
            {"a": 0.5, "b": 0.25, "c": 0.1, "d": 0.1},
        ),
    ],
)
def test_pods_without_a_quota_bear_what_switches_take(
    cores: dict[str, int | None], weights: dict[str, int], done: float, due: dict[str, float]
) -> None:
    assert dues(entries(cores, weights), done, 1.0) == pytest.approx(due)


@pytest.mark.parametrize("cores", [{"a": 60, "b": 30}, {"a": None, "b": None}])
def test_pods_of_one_kind_bear_switches_alike(cores: dict[str, int | None]) -> None:
    assert dues(entries(cores, {"a": 2, "b": 1}), 0.9, 1.0) == pytest.approx({"a": 0.6, "b": 0.3})


def gated(used: float, early: frozenset[str], whole_ms: int = 100) -> Mapping[str, float]:
    """Return the work that pods are said to have done in turns by gate of 60 and 40 ms, in so much time."""
    uses = {"a": GpuUse(60 * NS_PER_MS, 1), "b": GpuUse(40 * NS_PER_MS, 1)}
    return rates_by_gate(uses, with_windows(entries({"a": 60, "b": 40}, {"a": 60, "b": 40})), used, early, whole_ms)


def with_windows(pods: Mapping[str, RoundEntry]) -> dict[str, RoundEntry]:
    """Return the pods with windows of their own, as where they take turns by gate."""
    windows = (Window(0, NS_PER_MS),)
    return {name: each._replace(part=replace(each.part, windows=windows)) for name, each in pods.items() if each.part}


def rates_by_gate(
    uses: Mapping[str, GpuUse], pods: Mapping[str, RoundEntry], used: float, early: frozenset[str], whole_ms: int
) -> Mapping[str, float]:
    """Return the work that a trial of gates tells, with a card used for such a part of the time."""
    by_gate = Sharing(by_gate=True)
    return observe(by_gate, uses, pods, whole_ms * NS_PER_MS, used, frozenset(), early, OTHER, long=False).rates


@pytest.mark.parametrize(("used", "by_slices", "work"), [(1.0, 1.0, 0.5), (0.8, 1.0, 0.3), (0.7, 0.8, 0.32)])
def test_what_idles_in_reserved_time_is_its_owners(used: float, by_slices: float, work: float) -> None:
    pods = entries({"a": 40, "b": 60}, {"a": 40, "b": 60})
    sharing = Sharing(by_gate=True, ungated=frozenset("a"), reserved=0.4)
    uses = {"a": GpuUse(50 * NS_PER_MS), "b": GpuUse(45 * NS_PER_MS)}
    trial = observe(
        sharing,
        uses,
        pods,
        100 * NS_PER_MS,
        used,
        frozenset(),
        frozenset(),
        OTHER,
        long=False,
        used_by_slices=by_slices,
    )

    assert trial.rates == pytest.approx({"a": work, "b": 0.45})
    assert trial.reserved_use == pytest.approx(1 - (0.5 - work) / 0.4)


def test_switches_of_a_pod_beside_gates_are_no_work() -> None:
    pods = entries({"a": 60, "beside": 40}, {"a": 60, "beside": 40})
    pods["a"] = with_windows(pods)["a"]
    uses = {"a": GpuUse(60 * NS_PER_MS, 1), "beside": GpuUse(40 * NS_PER_MS, 100)}

    work_ms = 40 - 100 * OTHER.switched_ns / NS_PER_MS
    assert rates_by_gate(uses, pods, 1.0, frozenset(), 100) == pytest.approx({"a": 0.6, "beside": work_ms / 100})


def test_idle_time_by_gate_is_taken_off_pods_with_gaps() -> None:
    assert gated(0.85, frozenset({"a"})) == pytest.approx({"a": 0.45, "b": 0.4})


@pytest.mark.parametrize("early", [frozenset[str](), frozenset({"a", "b"})])
def test_idle_time_by_gate_is_taken_off_all_if_none_differs(early: frozenset[str]) -> None:
    assert gated(0.9, early) == pytest.approx({"a": 0.54, "b": 0.36})


def test_the_time_that_gates_take_to_move_is_no_pods_idle_time() -> None:
    assert gated(100 / 125, frozenset(), whole_ms=125) == pytest.approx({"a": 0.48, "b": 0.32})


def test_no_pod_idles_for_longer_than_its_turns() -> None:
    assert gated(0.3, frozenset({"b"})) == pytest.approx({"a": 0.18, "b": 0.12})


@pytest.mark.parametrize(("steps", "served"), [(2, True), (12, False)])
def test_a_resting_pod_may_have_missed_one_step_by_chance(steps: int, served: bool) -> None:
    """Pod a rests, and had twice as many steps of 1 ms in a trial of another way."""
    pods, turns = entries({"a": 50, "b": 50}, {"a": 1, "b": 1}), {"a": 1e6, "b": 1e6}
    ways = [Sharing(round_ns=4_000_000), Sharing(round_ns=8_000_000)]
    now, before = (
        Trial(way, {"a": count / 100, "b": 0.6}, turns, resting=frozenset("a"), watched_ns=100 * NS_PER_MS)
        for way, count in zip(ways, (steps, 2 * steps), strict=True)
    )

    assert (score(now, [now, before], pods) == sum(now.rates.values())) is served
