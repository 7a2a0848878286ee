"""Copy TSGs under a plan: which slices they get, when they are behind their pod's gate, and that it opens again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from qgpu.guardian.accounting.rm_object import RmObject, object_fact
from qgpu.guardian.gpu.gpu_ops import GpuOps
from qgpu.model import NS_PER_MS, OnIdle, Plan, PodClass, PodPlan
from qgpu.nvidia import abi
from tests.guardian.gpu.test_enforcer import card, retire, turns

MS = NS_PER_MS
COPY_TSG, COPY_CHANNEL = 31, 41


def copying(*names):
    """Give each process of a card a copy TSG with a channel, besides the compute TSG 30 with channels 40 and 50."""
    enforcer, engine, used = card(*names)
    for client in range(1, len(names) + 1):
        for rm in (
            RmObject(client, COPY_TSG, 20, abi.KEPLER_CHANNEL_GROUP_A, 11),
            RmObject(client, COPY_CHANNEL, COPY_TSG, 0xC86F),
        ):
            enforcer.table.note(object_fact(rm))
            enforcer.table.note({"fact": "confirm", "client": client, "handle": rm.handle})
    return enforcer, engine, used


def shared(**copy_us):
    """Plan open gates and slices of 5 ms, and these for copies."""
    return Plan(
        0,
        100 * MS,
        tuple(PodPlan(name, PodClass.OFFLINE, 5000, copy_timeslice_us=us) for name, us in copy_us.items()),
    )


def slices(engine):
    return {key[0]: us for key, us in engine.slices.items() if key[1] == COPY_TSG}


def gated(engine):
    return {key[0] for key in engine.off if key[1] == COPY_CHANNEL}


def test_copy_tsgs_get_their_pods_copy_slice():
    enforcer, engine, _ = copying("a", "b")
    enforcer.adopt(shared(a=4000, b=2000), 0)

    assert slices(engine) == {1: 4000, 2: 2000}
    assert {us for key, us in engine.slices.items() if key[1] == 30} == {5000}


def test_copy_tsgs_of_a_retired_pod_do_not_run_under_a_plan():
    enforcer, engine, _ = copying("gone", "a")
    retire(engine.table, "gone", 1)
    enforcer.adopt(shared(a=2000), 0)

    assert gated(engine) == {1}


def test_without_a_copy_slice_rm_is_not_asked_about_copy_tsgs():
    enforcer, engine, _ = copying("a", "b")
    enforcer.adopt(shared(a=None), 0)
    enforcer.adopt(None, MS)

    assert slices(engine) == {}


@pytest.mark.parametrize("after", [None, shared(a=None), shared(b=2000)], ids=["no plan", "no slice", "no pod"])
def test_unplanned_copy_tsg_gets_drivers_timeslice_back(after):
    enforcer, engine, _ = copying("a", "b")
    enforcer.adopt(shared(a=4000), 0)
    enforcer.adopt(after, MS)

    assert slices(engine)[1] == abi.RM_DEFAULT_TIMESLICE_US == 1024


def test_a_successor_gives_copy_tsgs_the_drivers_slice_back():
    enforcer, engine, _ = copying("a")
    enforcer.forget_timeslices()
    enforcer.adopt(None, 0)

    assert slices(engine) == {1: abi.RM_DEFAULT_TIMESLICE_US}


def test_windows_that_keep_their_time_gate_copies_too():
    enforcer, engine, _ = copying("a", "b")
    enforcer.adopt(turns("a", "b"), 0)
    seen = []
    for at in (0, 10 * MS, 20 * MS):
        enforcer.step(at)
        seen.append(gated(engine))

    assert seen == [{2}, {1}, {2}]


def test_a_pod_without_a_window_copies_nothing():
    enforcer, engine, _ = copying("a")
    enforcer.adopt(Plan(0, 100 * MS, (PodPlan("a", PodClass.OFFLINE, 5000, ()),)), 0)

    assert gated(engine) == {1}


def test_windows_that_are_lent_leave_copies_ungated():
    enforcer, engine, _ = copying("a", "b")
    enforcer.adopt(turns("a", "b", on_idle=OnIdle.YIELD), 0)

    assert engine.off == {(2, 40), (2, 50)}


@pytest.mark.parametrize("after", [None, shared(a=2000, b=2000), turns("a", "b", on_idle=OnIdle.YIELD)])
def test_copies_closed_by_one_plan_are_open_under_the_next(after):
    enforcer, engine, _ = copying("a", "b")
    enforcer.adopt(turns("a", "b"), 0)
    closed = gated(engine)
    enforcer.adopt(after, MS)

    assert closed == {2}
    assert gated(engine) == set()


def test_a_gated_copy_channel_being_freed_is_open_until_it_stays():
    enforcer, engine, _ = copying("a", "b")
    enforcer.adopt(turns("a", "b"), 0)
    enforcer.open_for_free([(2, COPY_CHANNEL)])
    leaving = gated(engine)
    enforcer.cancel_free([(2, COPY_CHANNEL)])
    enforcer.refresh(MS)

    assert leaving == set()
    assert gated(engine) == {2}


def test_copies_are_preempted_where_compute_is_handed_over():
    enforcer, engine, _ = copying("a", "b")
    plan = turns("a", "b")
    enforcer.adopt(replace(plan, pods=tuple(replace(pod, timeslice_us=50) for pod in plan.pods)), 0)
    asked = []
    gate = engine.gate

    def seen(device, channels, *, closed, preempt=True):
        asked.append((channels, closed, preempt))
        return gate(device, channels, closed=closed, preempt=preempt)

    engine.gate = seen
    enforcer.step(10 * MS)

    assert asked == [
        ([(1, 40), (1, 50)], True, False),
        ([(1, COPY_CHANNEL)], True, True),
        ([(2, 40), (2, COPY_CHANNEL), (2, 50)], False, True),
    ]


def test_opening_all_gates_of_a_card_opens_copies_too():
    enforcer, _, _ = copying("a", "b")
    opened = []
    device = SimpleNamespace(instance=0, set_channels=lambda keys, disabled, preempt: opened.extend(keys))
    GpuOps(enforcer.table, None, None, [device]).open_gates(device)

    assert sorted(opened) == [(client, handle) for client in (1, 2) for handle in (40, COPY_CHANNEL, 50)]


def test_channel_that_stands_alone_moves_with_its_pods_gate():
    enforcer, engine, _ = copying("a", "b")
    enforcer.table.note(object_fact(RmObject(1, 60, 20, 0xC86F, 11)))
    enforcer.table.note({"fact": "confirm", "client": 1, "handle": 60})
    enforcer.adopt(shared(a=4000, b=2000), 0)
    seen = [(1, 60) in engine.slices]  # its TSG has no handle
    for plan in (Plan(0, 100 * MS, (PodPlan("a", PodClass.OFFLINE, 5000, ()),)), None):
        enforcer.adopt(plan, MS)
        seen.append((1, 60) in engine.off)

    assert seen == [False, True, False]


def test_copies_on_the_compute_runlist_are_compute():
    """Such an engine takes the time of kernels: no copy slice, and the gate closes also where windows are lent."""
    enforcer, engine, _ = copying("a", "b")
    enforcer.table.grces = {0: {11}}
    enforcer.adopt(shared(a=4000, b=2000), 0)
    taken = {key[0]: us for key, us in engine.slices.items() if key[1] == COPY_TSG}
    enforcer.adopt(Plan(0, 100 * MS, (PodPlan("a", PodClass.OFFLINE, 5000, ()),)), MS)

    assert enforcer.table.copy_tsgs(0) == []
    assert taken == {1: 5000, 2: 5000}
    assert (1, COPY_CHANNEL) in engine.off
