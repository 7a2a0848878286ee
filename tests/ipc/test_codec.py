"""Plans as JSON: what was sent is what is read."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from qgpu.errors import InvalidValueError
from qgpu.ipc.codec import grants_from_json, grants_to_json, plan_from_json, plan_to_json, sample_from_json
from qgpu.model import (
    MAX_TIMESLICE_US,
    MIN_TIMESLICE_US,
    NS_PER_MS,
    Grant,
    OnIdle,
    Plan,
    PodClass,
    PodPlan,
    PodSample,
    Sample,
    TsgSample,
    Window,
)

PLAN = Plan(
    1,
    100 * NS_PER_MS,
    (
        PodPlan("web", PodClass.ONLINE, 4000, copy_timeslice_us=10_000),
        PodPlan("a", PodClass.OFFLINE, 50, (Window(0, NS_PER_MS, OnIdle.YIELD),), copy_timeslice_us=500),
        PodPlan("b", PodClass.OFFLINE, 50, (), tsg_turn_ns=251 * NS_PER_MS),
    ),
)


def test_a_plan_sent_is_the_plan_read() -> None:
    assert plan_from_json(json.loads(json.dumps(plan_to_json(PLAN)))) == PLAN


@pytest.mark.parametrize("us", [MIN_TIMESLICE_US - 1, MAX_TIMESLICE_US + 1])
def test_a_copy_slice_out_of_bounds_is_refused(us: int) -> None:
    with pytest.raises(InvalidValueError, match="copy timeslice"):
        PodPlan("a", PodClass.OFFLINE, 2000, copy_timeslice_us=us)


def test_grant_is_read_as_sent_and_allows_nothing_unsaid() -> None:
    grants = {0: Grant(cores=30, profiling=True, graphics=True), 1: Grant()}
    data = json.loads(json.dumps(grants_to_json(grants)))
    assert grants_from_json(data) == grants

    del data["0"]["profiling"], data["0"]["graphics"]
    assert grants_from_json(data) == {0: Grant(cores=30), 1: Grant()}


TSG = TsgSample("a/0", 7, 2, True, ((1, 4), (6, 10)), 5)
SAMPLE = Sample(1, 5, (PodSample("a", Grant(cores=30), (TSG,), 3, ended_ns=9, ended_starts=4, gpfifo_entries=12),))


def told(sample: Sample) -> dict[str, Any]:
    """Put a sample into JSON's types, as a guardian tells it."""
    data = json.loads(json.dumps(asdict(sample)))
    for said in data["pods"]:
        del said["grant"]
    return data


GRANTS = {pod.pod: pod.grant for pod in SAMPLE.pods}


def test_a_sample_told_is_the_sample_read() -> None:
    assert sample_from_json(told(SAMPLE), GRANTS) == SAMPLE


def test_a_guardian_from_before_an_upgrade_counts_no_entries() -> None:
    said = told(SAMPLE)
    del said["pods"][0]["gpfifo_entries"]

    assert sample_from_json(said, GRANTS).pods[0].gpfifo_entries is None
