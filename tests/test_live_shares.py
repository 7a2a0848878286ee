"""Marks of pods below their quota, over readings of a second."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from qgpu.live_shares import BelowQuota


def row(share: float, below: bool, *, busy: bool = True, pod: str = "web") -> dict[str, Any]:
    why = "waits" if below else None
    return {
        "gpu": 0, "pod": pod, "share": share, "cores": 20, "busy": busy, "below_quota": below, "below_quota_reason": why
    }  # fmt: skip


def marks(readings: list[dict[str, Any]]) -> list[bool]:
    settled, found = BelowQuota(), []
    for reading in readings:
        settled.settle([reading])
        found.append(reading["below_quota"])
    return found


def test_share_that_crosses_its_quota_keeps_one_mark() -> None:
    below = [True, True, True, False, True, False, True, True, False, True] * 3
    found = marks([row(0.19, each) for each in below])

    assert found == [True] * len(found)


def test_pod_that_is_seldom_below_its_quota_gets_no_mark() -> None:
    assert not any(marks([row(0.195, number % 3 == 2) for number in range(30)]))


def test_mark_goes_after_two_readings_with_the_whole_quota() -> None:
    found = marks([*[row(0.1, True)] * 10, row(0.2, False), row(0.2, False)])

    assert found == [True] * 11 + [False]


def test_idle_pods_and_others_of_the_name_have_no_mark() -> None:
    settled = BelowQuota()
    for _ in range(5):
        settled.settle([row(0.1, True)])
    settled.settle([])
    idle = [row(0.0, False, busy=False)]
    settled.settle(idle)

    assert not idle[0]["below_quota"]


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_a_marked_pod_has_a_reason(below: list[bool]) -> None:
    settled = BelowQuota()
    for each in below:
        reading = row(0.1, each)
        settled.settle([reading])
        assert reading["below_quota_reason"] == "waits" or not reading["below_quota"]
