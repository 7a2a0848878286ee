"""Copy slices, against every promise of ``qgpu.policies.copy_engines``."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.model import MAX_TIMESLICE_US, NS_PER_MS, GangTurn, Grant, Plan, Pod, PodClass, PodPlan, Snapshot, Tsg
from qgpu.policies.copy_engines import LEAST_US, MEAN_US, ONLINE_TIMES, with_copies
from qgpu.policies.registry import compose
from tests.policies.cases import Case, anything, drawn, each_composed, fresh

PERIOD = 100 * NS_PER_MS
Weighed = tuple[Plan, Snapshot]


def pod(name: str, pod_class: PodClass = PodClass.OFFLINE, *, cores: int | None = None, busy: int = 1) -> Pod:
    tsgs = tuple(Tsg(f"{name}/{n}", busy=n < busy) for n in range(max(1, busy)))
    return Pod(name, Grant(pod_class, cores), tsgs)


def planned(pods: tuple[Pod, ...], weights: list[int]) -> Weighed:
    parts = tuple(
        PodPlan(each.name, each.grant.pod_class, 2000, weight=weight)
        for each, weight in zip(pods, weights, strict=True)
    )
    return Plan(0, PERIOD, parts), Snapshot(0, PERIOD, pods)


@st.composite
def weighed(draw: st.DrawFn) -> Weighed:
    """Draw a plan by weights, or by quotas where a class has none, for up to eight pods of up to twelve processes."""
    number = draw(st.integers(1, 8))
    quotas = {pod_class: draw(st.booleans()) for pod_class in PodClass}
    pods, weights = [], []
    for n in range(number):
        pod_class = draw(st.sampled_from(PodClass))
        pods.append(pod(f"pod{n}", pod_class, cores=draw(st.integers(1, 100)), busy=draw(st.integers(0, 12))))
        weights.append(0 if quotas[pod_class] else draw(st.integers(1, 100_000)))
    return planned(tuple(pods), weights)


def slices(plan: Plan) -> list[int]:
    assert all(part.copy_timeslice_us is not None for part in plan.pods)
    return [part.copy_timeslice_us or 0 for part in plan.pods]


@fresh
@given(case=weighed())
def test_slices_of_a_class_are_in_the_ratio_of_its_weights(case: Weighed) -> None:
    plan, snapshot = case
    longest = MAX_TIMESLICE_US // ONLINE_TIMES
    given_us = slices(with_copies(plan, snapshot))
    per_weight = [
        (part.pod_class, us * each.busy_tsgs / (part.weight or each.grant.cores or 1))
        for part, each, us in zip(plan.pods, snapshot.pods, given_us, strict=True)
        if us < (MAX_TIMESLICE_US if part.pod_class is PodClass.ONLINE else longest)
    ]

    for (one, first), (other, second) in combinations(per_weight, 2):
        assert one is not other or first == pytest.approx(second, rel=0.02)


@fresh
@given(case=weighed())
def test_every_slice_is_within_bounds(case: Weighed) -> None:
    assert all(LEAST_US <= us <= MAX_TIMESLICE_US for us in slices(with_copies(*case)))


@fresh
@given(case=weighed())
def test_an_online_slice_is_twenty_times_any_offline_one(case: Weighed) -> None:
    by_class: dict[PodClass, list[int]] = {PodClass.ONLINE: [], PodClass.OFFLINE: []}
    for part, us in zip(case[0].pods, slices(with_copies(*case)), strict=True):
        by_class[part.pod_class].append(us)

    if all(by_class.values()):
        assert min(by_class[PodClass.ONLINE]) >= ONLINE_TIMES * max(by_class[PodClass.OFFLINE])
        assert min(by_class[PodClass.OFFLINE]) == LEAST_US


@fresh
@given(case=weighed())
def test_the_same_plan_gets_the_same_slices_and_only_those(case: Weighed) -> None:
    plan, snapshot = case
    once = with_copies(plan, snapshot)

    assert once == with_copies(plan, snapshot) == with_copies(once, snapshot)
    assert replace(once, pods=tuple(replace(part, copy_timeslice_us=None) for part in once.pods)) == plan


@fresh
@given(weight=st.integers(0, 100_000), pod_class=st.sampled_from(PodClass))
def test_a_pod_alone_has_the_mean_slice_whatever_it_weighs(weight: int, pod_class: PodClass) -> None:
    assert slices(with_copies(*planned((pod("alone", pod_class, cores=7),), [weight]))) == [MEAN_US]


def test_slices_have_their_mean_where_none_is_too_short() -> None:
    pods = (pod("a"), pod("b"), pod("c", busy=2))

    assert slices(with_copies(*planned(pods, [50, 30, 20]))) == [3000, 1800, 600]


def test_a_slice_too_short_lengthens_all_in_their_ratio() -> None:
    assert slices(with_copies(*planned((pod("a"), pod("b", busy=10)), [90, 10]))) == [45_000, 500]


def test_a_plan_without_weights_goes_by_quotas() -> None:
    assert slices(with_copies(*planned((pod("a", cores=60), pod("b", cores=30)), [0, 0]))) == [2667, 1333]


def test_offline_pods_of_extreme_weights_leave_room_for_online() -> None:
    pods = (pod("a"), pod("b"), pod("web", PodClass.ONLINE))

    assert slices(with_copies(*planned(pods, [1, 1000, 5]))) == [500, 50_000, MAX_TIMESLICE_US]


def test_online_pods_without_a_process_shorten_nobodys_slices() -> None:
    absent = Pod("web", Grant(PodClass.ONLINE))

    assert slices(with_copies(*planned((pod("a"), pod("b"), absent), [1, 1, 0]))) == [2000, 2000, 2000]


def test_a_pod_no_policy_has_weighed_yet_counts_as_the_lightest() -> None:
    web = PodClass.ONLINE
    pods = (pod("a", web), pod("b", web), Pod("late", Grant(web, cores=90)))

    assert slices(with_copies(*planned(pods, [30_000, 10_000, 0]))) == [3600, 1200, 1200]


def test_turns_of_gangs_leave_copy_slices_as_they_were() -> None:
    policy = compose("burst-share", "best-effort")
    snapshot = Snapshot(0, PERIOD, (pod("gang", cores=50), pod("busy", cores=30), pod("idle", cores=20, busy=0)))
    turns = (GangTurn("gang", 0, 50 * NS_PER_MS, 50 * NS_PER_MS),)

    in_step = policy(replace(snapshot, gang_turns=turns))
    assert in_step.gated
    assert slices(in_step) == slices(policy(snapshot)) == [3000, 1800, 1200]


@each_composed
@fresh
@anything
def test_every_composition_gives_every_pod_a_copy_slice(case: Case, data: st.DataObject) -> None:
    snapshot = drawn(data, case)
    plan = case.plan(snapshot)

    assert plan == with_copies(plan, snapshot)
    assert all(LEAST_US <= us <= MAX_TIMESLICE_US for us in slices(plan))
