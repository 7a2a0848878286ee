"""What debts do to plans: they move gates by little, change slices of a round within bounds, and starve nobody."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st

from qgpu.model import NS_PER_MS, Grant, Pod, PodClass, Snapshot, Tsg
from qgpu.policies.mechanism import MAX_DUE_GAIN, MAX_LONGER, MAX_LONGER_NS, MAX_OWED_CUT, STEP_NS
from qgpu.policies.registry import compose
from tests.forecast import forecast
from tests.policies.cases import (
    CAPPING,
    LENDING,
    TOLERANCE,
    Case,
    anything,
    drawn,
    each,
    fresh,
    has_round,
    lends_no_window,
    over,
)

#: Debts that the ledger lets come about, and then some; none at the edge of a step.
debts = st.integers(-100, 200).map(lambda ms: ms * NS_PER_MS + 300_000)


def indebted(data: st.DataObject, snapshot: Snapshot) -> Snapshot:
    """Give every pod a debt."""
    return replace(snapshot, pods=tuple(pod._replace(debt_ns=data.draw(debts)) for pod in snapshot.pods))


@each
@fresh
@anything
def test_no_debt_starves_a_busy_pod(case: Case, data: st.DataObject) -> None:
    calm = drawn(data, case)
    assume(lends_no_window(case, calm))
    owing = indebted(data, calm)
    plan = case.plan(owing)
    before, after = forecast(case.plan(calm), calm), forecast(plan, owing)

    step = STEP_NS / calm.period_ns
    least = (1 - MAX_OWED_CUT) / (1 + MAX_DUE_GAIN) if has_round(plan) else 0.5
    for pod in calm.pods:
        if pod.busy:
            assert after[pod.name] >= before[pod.name] * least - TOLERANCE - step


@over(CAPPING)
@fresh
@anything
def test_where_quotas_cap_only_who_is_owed_time_gets_more(case: Case, data: st.DataObject) -> None:
    snapshot = indebted(data, drawn(data, case))
    shares = forecast(case.plan(snapshot), snapshot)

    for pod in snapshot.pods:
        if not pod.online or case.online is None:
            quota = (pod.grant.cores or 0) / 100
            longer = max(MAX_LONGER, MAX_LONGER_NS / snapshot.period_ns) if pod.debt_ns < 0 else 0
            assert shares[pod.name] <= quota + longer + 1e-6


@each
@fresh
@anything
def test_a_debt_that_changes_by_little_changes_no_plan(case: Case, data: st.DataObject) -> None:
    snapshot = indebted(data, drawn(data, case))
    nudged = replace(
        snapshot, pods=tuple(p._replace(debt_ns=p.debt_ns + data.draw(st.integers(0, 99_999))) for p in snapshot.pods)
    )

    assert case.plan(snapshot) == case.plan(nudged)


@each
@fresh
@anything
def test_debts_change_slices_of_a_round_only_and_within_bounds(case: Case, data: st.DataObject) -> None:
    owing = indebted(data, drawn(data, case))
    calm = replace(owing, pods=tuple(pod._replace(debt_ns=0) for pod in owing.pods))
    plan = case.plan(owing)
    shorter, longer = (MAX_OWED_CUT, MAX_DUE_GAIN) if has_round(plan) else (0.0, 0.0)

    for pod, part, otherwise in zip(owing.pods, plan.pods, case.plan(calm).pods, strict=True):
        least = 1 - (shorter if pod.debt_ns > 0 else 0)
        most = 1 + (longer if pod.debt_ns < 0 else 0)
        # both are rounded to a whole µs
        assert least * otherwise.timeslice_us - 2 <= part.timeslice_us <= most * otherwise.timeslice_us + 2


@over(LENDING)
@fresh
@anything
def test_a_pod_busy_alone_has_no_gate_moved(case: Case, data: st.DataObject) -> None:
    snapshot = indebted(data, drawn(data, case, PodClass.OFFLINE))
    assume(snapshot.pods)
    one = data.draw(st.sampled_from(snapshot.pods)).name
    lone = replace(
        snapshot,
        pods=tuple(
            pod if pod.name == one else pod._replace(tsgs=tuple(t._replace(busy=False) for t in pod.tsgs))
            for pod in snapshot.pods
        ),
    )

    assert not case.plan(lone).gated


def test_debt_to_online_pods_leaves_offline_pods_half() -> None:
    online = tuple(
        Pod(f"on{n}", Grant(PodClass.ONLINE, 9), (Tsg(f"on{n}/0", True),), debt_ns=-100 * NS_PER_MS) for n in range(10)
    )
    offline = Pod("off", Grant(cores=10), (Tsg("off/0", True),))
    snapshot = Snapshot(0, 100 * NS_PER_MS, (*online, offline))

    assert forecast(compose("burst-share", "fixed-share")(snapshot), snapshot)["off"] >= 0.05


def test_debts_of_both_classes_leave_offline_pod_half_its_turn() -> None:
    online = Pod("on", Grant(PodClass.ONLINE, 69), (Tsg("on/0", True),), debt_ns=-6 * NS_PER_MS)
    owed = [Pod(name, Grant(cores=1), (Tsg(f"{name}/0", True),), debt_ns=-6 * NS_PER_MS) for name in "bc"]
    owing = Snapshot(
        0, 10 * NS_PER_MS, (online, Pod("a", Grant(cores=1), (Tsg("a/0", True),), debt_ns=6 * NS_PER_MS), *owed)
    )
    calm = replace(owing, pods=tuple(pod._replace(debt_ns=0) for pod in owing.pods))
    plan = compose("burst-share", "fixed-share")

    assert forecast(plan(owing), owing)["a"] >= forecast(plan(calm), calm)["a"] / 2
