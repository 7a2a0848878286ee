"""Plans as JSON: what was sent is what is read, also from and to another version."""

from __future__ import annotations

import json

import pytest

from qgpu.errors import InvalidValueError
from qgpu.messages import plan_from, plan_to
from qgpu.model import MAX_TIMESLICE_US, MIN_TIMESLICE_US, NS_PER_MS, OnIdle, Plan, PodClass, PodPlan, Window

PLAN = Plan(
    1,
    100 * NS_PER_MS,
    (
        PodPlan("web", PodClass.ONLINE, 4000, copy_timeslice_us=10_000),
        PodPlan("a", PodClass.OFFLINE, 50, (Window(0, NS_PER_MS, OnIdle.YIELD),), copy_timeslice_us=500),
        PodPlan("b", PodClass.OFFLINE, 50, ()),
    ),
)


def test_a_plan_sent_is_the_plan_read() -> None:
    assert plan_from(json.loads(json.dumps(plan_to(PLAN)))) == PLAN


def test_a_plan_without_copy_slices_leaves_them_the_drivers() -> None:
    data = plan_to(PLAN)
    for part in data["pods"]:
        del part["copy_timeslice_us"]

    assert [part.copy_timeslice_us for part in plan_from(data).pods] == [None, None, None]


@pytest.mark.parametrize("us", [MIN_TIMESLICE_US - 1, MAX_TIMESLICE_US + 1])
def test_a_copy_slice_out_of_bounds_is_refused(us: int) -> None:
    with pytest.raises(InvalidValueError, match="copy timeslice"):
        PodPlan("a", PodClass.OFFLINE, 2000, copy_timeslice_us=us)
