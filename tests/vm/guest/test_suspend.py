"""Suspend and resume, as far as the VM goes: its file system's device refuses to sleep, so everybody is woken again."""

from __future__ import annotations

import contextlib
import os

import nv
import pytest
import qg

MS = qg.MS


def flood(state):
    p = state["p"] = nv.Program()
    _, (channel,) = p.compute()
    p.submit(channel, 1000)


def suspend():
    """Prepare, freeze every process, begin with the devices, and back; what the driver saw meanwhile."""
    before = qg.sim()
    state = os.open("/sys/power/state", os.O_WRONLY)
    with contextlib.suppress(OSError):
        os.write(state, b"freeze")
    os.close(state)
    after = qg.sim()
    assert after["sleeps"] == before["sleeps"] + 1
    return {name: after[name] - before[name] for name in ("asleep_off", "asleep_calls")}


@pytest.fixture
def two(pod):
    pods = [pod(name) for name in "ab"]
    for each in pods:
        each.process().run(flood)
    return pods


def test_gates_are_open_and_rm_is_not_called_during_suspend(qgpu, two):
    a, b = two
    turns = [(a.id, 1000, [(0, 20 * MS, 0)]), (b.id, 1000, [(20 * MS, 40 * MS, 0)])]
    qgpu.plan(*turns, period_ns=40 * MS, lease_ns=60_000 * MS)
    seen = [suspend() for _ in range(3)]

    assert seen == [{"asleep_off": 0, "asleep_calls": 0}] * 3


def test_gates_close_again_after_a_resume(qgpu, two):
    a, b = two
    qgpu.plan((a.id, 5000, []), (b.id, 5000), lease_ns=60_000 * MS)
    suspend()

    assert [(tsg["off"], tsg["slice_ns"]) for tsg in qg.sim_tsgs()] == [(1, 5_000_000), (0, 5_000_000)]


def test_a_lease_that_lapses_meanwhile_leaves_the_gates_open(qgpu, two):
    lapsed = qg.uapi.NUMBERS["QGPU_EVENT_LEASE_LAPSED"]
    qgpu.events()
    qgpu.plan(*((pod.id, 5000, []) for pod in two), lease_ns=100 * MS)
    suspend()
    qg.until(lambda: any(event.type == lapsed for event in qgpu.events()))

    # the event is told first, then the gates are opened
    qg.until(lambda: [(tsg["off"], tsg["slice_ns"]) for tsg in qg.sim_tsgs()] == [(0, 1_024_000)] * 2)
