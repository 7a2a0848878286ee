"""Which pods take turns by gate, and how much of the card gates may leave idle."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from qgpu.model import Grant, PodClass, PodPlan, Sharing
from qgpu.sched.candidates import RETRY_NS, all_retry_due, gates_worth_a_trial, least_gated_use
from qgpu.sched.gpu_usage import GpuUse, RoundEntry
from qgpu.sched.slice_tuner import begin
from qgpu.sched.trial import Trial
from qgpu.sched.tuning import KEPT_NS, Tuning


def entries(**cores: int) -> dict[str, RoundEntry]:
    """Make busy pods with these quotas in per cent."""
    return {
        name: RoundEntry(Grant(cores=quota), PodPlan(name, PodClass.OFFLINE, 2000, weight=quota), GpuUse(), 0, 1)
        for name, quota in cores.items()
    }


def trial(uneven: Collection[str] = (), resting: Collection[str] = (), **rates: float) -> Trial:
    """Make a trial of slices in which pods with less than a tenth of the card ended their turns early."""
    early = frozenset(name for name, rate in rates.items() if rate < 0.1)
    return Trial(
        Sharing(round_ns=4_000_000), rates, dict.fromkeys(rates, 1e6), uneven=frozenset(uneven),
        early=early, switching=0.2, resting=frozenset(resting),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "ungated"),
    [
        (trial(a=0.05, b=0.7, c=0.15), set()),
        (trial(uneven="c", a=0.05, b=0.7, c=0.08), {"c"}),
        (trial(resting="c", a=0.05, b=0.7, c=0.08), {"c"}),
        (trial(uneven="b", a=0.05, b=0.7), None),
        (trial(resting="b", a=0.05, b=0.7), set()),
        (trial(uneven="b", resting="c", a=0.05, b=0.5, c=0.15), {"b"}),
        (trial(uneven="a", a=0.05, b=0.7, c=0.25), None),
    ],
)
def test_pods_that_leave_gaps_get_no_window(found: Trial, ungated: set[str] | None) -> None:
    quotas = {"a": 40, "b": 30, "c": 20}
    pods = entries(**{name: quotas[name] for name in found.rates})
    gates = gates_worth_a_trial(begin([1, 1]), found, pods)

    assert (gates and gates.ungated) == ungated


@pytest.mark.parametrize(
    ("found", "least"),
    [
        (trial(a=0.05, b=0.75), 0.56),
        (trial(a=0.05, b=0.05, c=0.75), 0.8755),
        (trial(resting="b", a=0.05, b=0.75), 0.824),
    ],
)
def test_gates_may_idle_where_one_pod_leaves_gaps(found: Trial, least: float) -> None:
    gated = found._replace(sharing=Sharing(by_gate=True))

    assert least_gated_use(begin([1, 1]), gated, found) == pytest.approx(least)


def test_gates_may_idle_where_the_entries_of_all_count() -> None:
    found = trial(a=0.05, b=0.05, c=0.75)._replace(counted=frozenset("ab"))
    gated = found._replace(sharing=Sharing(by_gate=True))

    assert least_gated_use(begin([1, 1]), gated, found) == pytest.approx(0.7 * 0.85)


@pytest.mark.parametrize(
    ("sharing", "switching", "kept", "after_ns"),
    [
        (Sharing(by_gate=True), 0.0, False, RETRY_NS),
        (Sharing(), 0.2, False, RETRY_NS),
        (Sharing(), 0.01, False, None),
        (Sharing(), 0.01, True, KEPT_NS),
        (Sharing(by_gate=True), 0.0, True, KEPT_NS),
    ],
)
def test_every_way_is_tried_again_once_trials_are_old(
    sharing: Sharing, switching: float, kept: bool, after_ns: int | None
) -> None:
    found = trial(a=0.4, b=0.5)._replace(sharing=sharing, switching=switching)
    now = Tuning(sharing, trials=(found,), settled=True)
    now = now.keep(found, 0) if kept else now

    for now_ns in (KEPT_NS - 1, KEPT_NS, RETRY_NS - 1, RETRY_NS):
        assert all_retry_due(now, found, now_ns) is (after_ns is not None and now_ns >= after_ns)
