"""Every registered policy, alone and in every composition online x offline, against every promise."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from qgpu.model import (
    MAX_PERIOD_NS,
    MAX_TIMESLICE_US,
    MIN_LATENCY_TARGET_NS,
    MIN_TIMESLICE_US,
    NS_PER_S,
    NS_PER_US,
    Grant,
    Plan,
    Pod,
    PodClass,
    Sharing,
    Snapshot,
    Tsg,
)
from qgpu.model.hardware_traits import OTHER
from qgpu.policies import latency_targets
from qgpu.policies.copy_engines import with_copies
from qgpu.policies.mechanism import DRIVER_SLICE_NS, MIN_WORTHWHILE_US
from qgpu.policies.online_first import LOOSE_TARGET_NS
from qgpu.policies.registry import POLICIES
from tests.forecast import forecast
from tests.policies.cases import (
    CAPPING,
    GUARANTEEING,
    LENDING,
    TOLERANCE,
    Case,
    anything,
    drawn,
    each,
    each_composed,
    fresh,
    has_round,
    lends_no_window,
    over,
    started,
)
from tests.strategies import snapshots


def unbounded(plan: Plan) -> bool:
    """Tell whether no timeslice met the shortest one, below which shares can't be kept by slices."""
    return all(part.timeslice_us > MIN_TIMESLICE_US for part in plan.pods)


def asked(case: Case, snapshot: Snapshot) -> list[Plan]:
    """Return what the policies themselves say where slices serve: long ones, before anything shortens them."""
    pods = tuple(pod._replace(satisfied=False) for pod in snapshot.pods)
    snapshot = replace(snapshot, pods=pods, offline=Sharing(), online=Sharing())
    if case.online is None:
        return [case.plan(snapshot)]
    online, offline = (tuple(pod for pod in snapshot.pods if pod.online is flag) for flag in (True, False))
    return [
        POLICIES[case.online].plan(replace(snapshot, pods=tuple(pod for pod in online if pod.tsgs))),
        POLICIES[case.offline].plan(replace(snapshot, pods=offline)),
    ]


def served(plan: Plan, snapshot: Snapshot) -> dict[str, float]:
    """Return shares as they are meant: of work in a round shorter than the period, else of the time on the pGPU."""
    return forecast(plan, snapshot, work=has_round(plan))


def leeway(plan: Plan, snapshot: Snapshot) -> float:
    """Return how exact shares are: a shorter round has the ratio of the long one's slices, switches left out."""
    if not has_round(plan):
        return TOLERANCE
    turns = sum(pod.busy_tsgs for pod in snapshot.pods if pod.tsgs)
    return TOLERANCE + turns * OTHER.switched_ns / snapshot.period_ns


def idle_but(snapshot: Snapshot, online: bool) -> Snapshot:
    """Put the pods of the other class to rest."""
    return replace(
        snapshot,
        pods=tuple(
            pod if pod.online is online else pod._replace(tsgs=tuple(t._replace(busy=False) for t in pod.tsgs))
            for pod in snapshot.pods
        ),
    )


def busier(pod: Pod, tsgs: int) -> Pod:
    """Give a pod this many busy TSGs."""
    return pod._replace(tsgs=tuple(Tsg(f"{pod.name}/{n}", busy=True) for n in range(tsgs)))


def with_pod(snapshot: Snapshot, at: int, pod: Pod) -> Snapshot:
    """Put ``pod`` in the place of the one at index ``at``."""
    return replace(snapshot, pods=(*snapshot.pods[:at], pod, *snapshot.pods[at + 1 :]))


@each
@fresh
@anything
def test_plans_name_every_pod_once_and_in_order(case: Case, data: st.DataObject) -> None:
    snapshot = drawn(data, case)

    assert [pod.name for pod in snapshot.pods] == [part.pod for part in case.plan(snapshot).pods]


@each
@fresh
@anything
def test_windows_lie_within_the_period_and_slices_within_bounds(case: Case, data: st.DataObject) -> None:
    snapshot = data.draw(snapshots(everybody=case.everybody))
    plan = case.plan(snapshot)

    assert snapshot.period_ns <= plan.period_ns <= MAX_PERIOD_NS
    for part in plan.pods:
        assert MIN_TIMESLICE_US <= part.timeslice_us <= MAX_TIMESLICE_US
        assert all(0 <= window.start_ns < window.end_ns <= plan.period_ns for window in part.windows or ())


@each
def test_no_pods_make_an_empty_plan(case: Case) -> None:
    assert replace(case.plan(Snapshot(3, 100_000_000)), offline=None) == Plan(3, 100_000_000)


@each
@fresh
@anything
def test_the_same_snapshot_makes_the_same_plan(case: Case, data: st.DataObject) -> None:
    snapshot = drawn(data, case)
    copy = replace(snapshot, pods=tuple(pod._replace(tsgs=tuple(pod.tsgs)) for pod in snapshot.pods))

    plan = case.plan(snapshot)
    case.plan(Snapshot(snapshot.pgpu, snapshot.period_ns))  # a composed policy remembers the last one

    assert case.plan(copy) == plan


@each
@fresh
@anything
def test_renaming_pods_renames_the_plan_and_nothing_else(case: Case, data: st.DataObject) -> None:
    snapshot = drawn(data, case)
    names = {pod.name: f"other{9 - at}" for at, pod in enumerate(snapshot.pods)}
    renamed = replace(snapshot, pods=tuple(pod._replace(name=names[pod.name]) for pod in snapshot.pods))

    expected = tuple(replace(part, pod=names[part.pod]) for part in case.plan(snapshot).pods)
    assert expected == case.plan(renamed).pods


@each
@fresh
@anything
def test_the_order_of_pods_changes_nobodys_share(case: Case, data: st.DataObject) -> None:
    snapshot = drawn(data, case)
    assume(lends_no_window(case, snapshot))
    shuffled = replace(snapshot, pods=tuple(data.draw(st.permutations(snapshot.pods))))

    assert forecast(case.plan(snapshot), snapshot) == pytest.approx(
        forecast(case.plan(shuffled), shuffled), abs=TOLERANCE
    )


@each
@fresh
@anything
def test_a_busy_pod_always_gets_something(case: Case, data: st.DataObject) -> None:
    snapshot = drawn(data, case)
    shares = forecast(case.plan(snapshot), snapshot)

    assert all(shares[pod.name] > 0 for pod in snapshot.pods if pod.busy)


@over(LENDING)
@fresh
@anything
def test_where_policies_lend_nobody_waits_for_an_idle_pgpu(case: Case, data: st.DataObject) -> None:
    snapshot = drawn(data, case)
    assume(any(pod.busy for pod in snapshot.pods))

    assert sum(forecast(case.plan(snapshot), snapshot).values()) == pytest.approx(1.0)


@each
@fresh
@anything
def test_more_quota_never_means_less_share(case: Case, data: st.DataObject) -> None:
    snapshot = drawn(data, case)
    left = 100 - sum(pod.grant.cores or 0 for pod in snapshot.pods)
    candidates = [i for i, pod in enumerate(snapshot.pods) if pod.grant.cores]
    assume(left and candidates)
    at = data.draw(st.sampled_from(candidates))
    pod = snapshot.pods[at]
    more = data.draw(st.integers(1, left))
    raised = with_pod(snapshot, at, pod._replace(grant=replace(pod.grant, cores=(pod.grant.cores or 0) + more)))

    before, after = case.plan(snapshot), case.plan(raised)
    assume(unbounded(before) and unbounded(after))
    less, more = forecast(before, snapshot), forecast(after, raised)

    # Between the classes slices decide, and the shortest turn bounds them: the pod's class as a whole may get less.
    own = [each.name for each in snapshot.pods if each.online == pod.online]
    kept = min(1.0, sum(more[name] for name in own) / (sum(less[name] for name in own) or 1.0))
    assert more[pod.name] >= (kept if case.online is not None else 1.0) * less[pod.name] - TOLERANCE


@each
@fresh
@anything
def test_more_busy_processes_never_mean_more_share(case: Case, data: st.DataObject) -> None:
    snapshot = drawn(data, case)
    candidates = [i for i, pod in enumerate(snapshot.pods) if pod.busy]
    assume(candidates)
    at = data.draw(st.sampled_from(candidates))
    few, many = sorted((data.draw(st.integers(1, 4)), data.draw(st.integers(5, 32))))
    one, other = (with_pod(snapshot, at, busier(snapshot.pods[at], n)) for n in (few, many))
    assume(all(unbounded(plan) for plan in asked(case, other)))

    # Between the classes an offline TSG is at the shortest slice by design: compare within the pod's own class.
    name = snapshot.pods[at].name
    if case.online is not None:
        one, other = (idle_but(s, snapshot.pods[at].online) for s in (one, other))
    less, more = (case.plan(each) for each in (one, other))
    assert served(more, other)[name] <= served(less, one)[name] + max(leeway(less, one), leeway(more, other))


@over(GUARANTEEING)
@fresh
@anything
def test_a_quota_is_a_floor_where_the_policy_guarantees_it(case: Case, data: st.DataObject) -> None:
    snapshot = drawn(data, case, PodClass.OFFLINE)
    plan = case.plan(snapshot)
    assume(case in CAPPING or unbounded(plan))
    shares, exact = served(plan, snapshot), leeway(plan, snapshot)

    for pod in snapshot.pods:
        if pod.busy:
            assert shares[pod.name] >= (pod.grant.cores or 0) / 100 - exact


@fresh
@given(cores=st.integers(1, 99), guests=st.integers(1, 2))
def test_guests_of_a_sold_card_cost_no_quota_and_no_long_turn(cores: int, guests: int) -> None:
    quotas = [cores, 100 - cores, *[None] * guests]
    pods = tuple(busier(Pod(f"pod{n}", Grant(cores=quota)), 1) for n, quota in enumerate(quotas))
    plan = POLICIES["burst-share"].plan(Snapshot(0, 100_000_000, pods, offline=Sharing(by_gate=True)))

    assert plan.period_ns <= NS_PER_S
    for part, quota in zip(plan.pods, quotas, strict=True):
        assert (part.turn_ns or 0) >= plan.period_ns * ((quota or 0) / 100 - TOLERANCE)


@over(CAPPING)
@fresh
@anything
def test_where_quotas_cap_no_offline_pod_gets_more_than_its_own(case: Case, data: st.DataObject) -> None:
    snapshot = drawn(data, case)
    shares = forecast(case.plan(snapshot), snapshot)

    for pod in snapshot.pods:
        if not pod.online or case.online is None:
            assert shares[pod.name] <= (pod.grant.cores or 0) / 100 + 1e-9


@fresh
@given(snapshot=snapshots(everybody=True))
def test_program_starts_under_fixed_share_without_gate_or_window(snapshot: Snapshot) -> None:
    plan, calm = (POLICIES["fixed-share"].plan(each) for each in (snapshot, started(snapshot)))

    for pod, part, otherwise in zip(snapshot.pods, plan.pods, calm.pods, strict=True):
        assert part.windows == (None if pod.starting else otherwise.windows)
        assert part.timeslice_us <= otherwise.timeslice_us


@fresh
@given(snapshot=snapshots(everybody=True))
def test_fixed_share_windows_never_overlap(snapshot: Snapshot) -> None:
    plan = POLICIES["fixed-share"].plan(snapshot)
    windows = sorted((w.start_ns, w.end_ns) for part in plan.pods for w in part.windows or ())

    assert all(before[1] <= after[0] for before, after in pairwise(windows))


@fresh
@given(snapshot=snapshots(everybody=False))
def test_best_effort_gives_every_busy_pod_the_same(snapshot: Snapshot) -> None:
    plan = POLICIES["best-effort"].plan(snapshot)
    busy = [pod.name for pod in snapshot.pods if pod.busy]
    assume(busy and unbounded(plan))
    shares, exact = served(plan, snapshot), leeway(plan, snapshot)

    assert [shares[name] for name in busy] == pytest.approx([1 / len(busy)] * len(busy), abs=exact)


@fresh
@given(snapshot=snapshots(everybody=False))
def test_best_effort_closes_no_gate_and_keeps_the_drivers_round(snapshot: Snapshot) -> None:
    calm = started(snapshot)
    plan, longest = (POLICIES["best-effort"].plan(each) for each in (calm, replace(calm, offline=Sharing())))
    busy = [(part, pod.busy_tsgs) for part, pod in zip(plan.pods, snapshot.pods, strict=True) if pod.busy]
    long = [(part, pod.busy_tsgs) for part, pod in zip(longest.pods, snapshot.pods, strict=True) if pod.busy]
    round_us, long_us = (sum(part.timeslice_us * tsgs for part, tsgs in each) for each in (busy, long))

    turns = sum(tsgs for _, tsgs in busy)
    assert not plan.gated
    assert round_us >= min(long_us, turns * DRIVER_SLICE_NS // NS_PER_US) - turns


@each_composed
@fresh
@anything
def test_offline_pods_never_close_the_gate_of_an_online_pod(case: Case, data: st.DataObject) -> None:
    snapshot = drawn(data, case)
    alone = replace(snapshot, pods=tuple(pod for pod in snapshot.pods if pod.online))

    parts = case.plan(snapshot).pods
    online = [part.windows for part, pod in zip(parts, snapshot.pods, strict=True) if pod.online]
    assert [part.windows for part in case.plan(alone).pods] == online


@each_composed
@fresh
@anything
def test_offline_slices_are_shortest_beside_untargeted_online(case: Case, data: st.DataObject) -> None:
    snapshot = drawn(data, case)
    assume(any(pod.tsgs for pod in snapshot.pods if pod.online and pod.grant.latency_target_ns is None))
    fragmented = any(pod.fragmented for pod in snapshot.pods if pod.online and pod.tsgs)
    most_us = latency_targets.FRAGMENTED_US if fragmented else MIN_TIMESLICE_US

    for part, pod in zip(case.plan(snapshot).pods, snapshot.pods, strict=True):
        if not pod.online:
            assert MIN_TIMESLICE_US <= part.timeslice_us <= most_us


@each_composed
@fresh
@anything
def test_a_tighter_latency_target_never_means_a_longer_slice(case: Case, data: st.DataObject) -> None:
    snapshot = drawn(data, case)
    candidates = [i for i, pod in enumerate(snapshot.pods) if pod.online and pod.grant.latency_target_ns]
    assume(candidates)
    at = data.draw(st.sampled_from(candidates))
    pod = snapshot.pods[at]
    target_ns = pod.grant.latency_target_ns or 0
    tighter_ns = data.draw(st.integers(MIN_LATENCY_TARGET_NS, target_ns))
    tight = with_pod(snapshot, at, pod._replace(grant=replace(pod.grant, latency_target_ns=tighter_ns)))

    # From 2 ms on offline turns are shorter and so may slices be, to fit into them: across that only the target binds.
    bound = [pod.online or (tighter_ns >= LOOSE_TARGET_NS) is (target_ns >= LOOSE_TARGET_NS) for pod in snapshot.pods]
    # The policy's ratio is one of time, that of a round the ledger found is one of work: they differ by the switch that
    # is charged to a turn, most where the shortest slice is the shortest sensible one.
    longer = OTHER.turn_ns(MIN_WORTHWHILE_US) / (MIN_WORTHWHILE_US * OTHER.timeslice_us_ns)
    for before, after, binds in zip(case.plan(snapshot).pods, case.plan(tight).pods, bound, strict=True):
        if binds:
            most_us = before.timeslice_us * (longer if after.pod_class is PodClass.ONLINE else 1)
            assert after.timeslice_us <= most_us + 2


@each_composed
@fresh
@anything
def test_pods_waited_for_keep_the_latency_target(case: Case, data: st.DataObject) -> None:
    snapshot = drawn(data, case)
    online = [pod.grant for pod in snapshot.pods if pod.online and pod.tsgs]
    targets = [grant.latency_target_ns for grant in online if grant.latency_target_ns is not None]
    waiting = [pod for pod in snapshot.pods if not pod.online and pod.busy]
    assume(targets and waiting)

    for part, pod in zip(case.plan(snapshot).pods, snapshot.pods, strict=True):
        if pod in waiting and part.timeslice_us > MIN_TIMESLICE_US:
            # What the table says a slice adds beyond itself; of a pod one TSG has its turn at a time.
            assert part.timeslice_us + 176 + latency_targets.IN_PHASE_US <= min(targets) / NS_PER_US


@each_composed
@fresh
@anything
def test_offline_policy_rules_without_online_pod_on_card(case: Case, data: st.DataObject) -> None:
    snapshot = drawn(data, case, PodClass.OFFLINE)

    assert with_copies(POLICIES[case.offline].plan(snapshot), snapshot) == case.plan(snapshot)


@each_composed
@fresh
@anything
def test_offline_pods_keep_shares_beside_idle_online_pod(case: Case, data: st.DataObject) -> None:
    offline = drawn(data, case, PodClass.OFFLINE)
    waiting = Pod("waiting", tsgs=(Tsg("waiting/0"),))
    waiting = waiting._replace(grant=replace(waiting.grant, pod_class=PodClass.ONLINE))
    mixed = replace(offline, pods=(*offline.pods, waiting))

    calm = replace(offline, offline=Sharing())  # beside online pods they have no round of their own
    plan = POLICIES[case.offline].plan(calm)
    assume(case in CAPPING or unbounded(plan))
    expected = forecast(plan, calm)
    assert {**expected, "waiting": 0.0} == pytest.approx(forecast(case.plan(mixed), mixed), abs=TOLERANCE)
