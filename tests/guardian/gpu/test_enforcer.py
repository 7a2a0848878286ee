"""The enforcer and the counter: what is done to which channel when, and whose time it was."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.rm_object import RmObject, object_fact
from qgpu.guardian.gpu import enforcer as enforcer_module
from qgpu.guardian.gpu.enforcer import _AT_ONCE, RETRY_NS, Enforcer
from qgpu.guardian.gpu.gpu_ops import Moved
from qgpu.model import NS_PER_MS, NS_PER_S, OnIdle, Plan, PodClass, PodPlan, Window
from qgpu.nvidia import abi
from qgpu.nvidia.gpu_time import Event, GpuTime, GpuTimeCounter

MS = NS_PER_MS


@pytest.fixture(autouse=True)
def steps_of_any_length(monkeypatch):
    monkeypatch.setattr(enforcer_module, "_STEP_NS", 3600 * NS_PER_S)


class Engine:
    """What a card would remember: which channels are off, which slices are set. Knows only real channels."""

    def __init__(self, table):
        self.table = table
        self.counts = {}
        self.slices = {}
        self.calls = 0
        self.preempted = []
        self.broken = False
        self.took_ns = 0
        self.lost = set()

    def gate(self, device, channels, *, closed, preempt=True):
        self.calls += 1
        self.preempted.append(preempt)
        gone = {key for key in channels if key not in self.table.objects}
        if self.broken:
            return Moved(frozenset(gone), frozenset(channels) - gone)
        for key in set(channels) - gone:
            self.counts[key] = self.counts.get(key, 0) + 1 if closed else max(0, self.counts.get(key, 0) - 1)
        return Moved(frozenset(gone), took_ns=self.took_ns)

    @property
    def off(self):
        """Channels that don't run: as RM does it counts how often each was closed."""
        return {key for key, count in self.counts.items() if count}

    def timeslice(self, tsg, timeslice_us):
        self.slices[tsg.key] = timeslice_us
        return True


def card(*names):
    """Make one pGPU with a pod of one process for each name: client 1, 2, ...; TSG 30 with channels 40 and 50."""
    table = ObjectTable()
    for client, name in enumerate(names, 1):
        facts = [
            {"fact": "pod", "name": name, "grants": {}},
            {"fact": "process", "pid": client, "pod": name},
            {"fact": "client", "client": client, "pid": client, "fd": 3},
            object_fact(RmObject(client, 20, client, abi.NV01_DEVICE_0, 0)),
            object_fact(RmObject(client, 30, 20, abi.KEPLER_CHANNEL_GROUP_A, 1)),
            object_fact(RmObject(client, 40, 30, 0xC86F)),
            object_fact(RmObject(client, 50, 30, 0xC86F)),
            *({"fact": "confirm", "client": client, "handle": handle} for handle in (20, 30, 40, 50)),
        ]
        for fact in facts:
            table.note(fact)
    engine = Engine(table)
    used = dict.fromkeys(names, 0)

    def tsgs_used_ns(pod):
        own = [tsg.key for tsg in table.compute_tsgs(0) if table.pod_of(tsg) == pod]
        first = dict.fromkeys(sorted(own)[:1], used[pod])  # a pod's other time
        return {key: used.get(key, 0) + first.get(key, 0) for key in sorted(own)}

    one = SimpleNamespace(instance=0)
    made = Enforcer(one, table, engine, lambda keys: None, tsgs_used_ns, lambda now_ns: None)
    return made, engine, used


def turns(*names, on_idle=OnIdle.KEEP, length=10 * MS):
    """Plan equal windows, one after the other."""
    pods = tuple(
        PodPlan(name, PodClass.OFFLINE, 2000, (Window(i * length, (i + 1) * length, on_idle),))
        for i, name in enumerate(names)
    )
    return Plan(0, length * len(names), pods)


def test_a_tsg_whose_client_is_lost_does_not_run_under_a_plan():
    enforcer, engine, _ = card("a", "b")
    free = PodPlan("a", PodClass.OFFLINE, 2000, None), PodPlan("b", PodClass.OFFLINE, 2000, None)
    enforcer.adopt(Plan(0, 10 * MS, free), 0)
    engine.lost = {1}
    enforcer.refresh(1)
    off = {client for client, _ in engine.off}
    engine.lost = set()
    enforcer.refresh(2)
    found = set(engine.off)
    engine.lost = {1}
    enforcer.adopt(None, 3)

    assert (off, found, engine.off) == ({1}, set(), set())


def retire(table, name, client):
    """End a pod's only process and the pod; RM still has its client, because another pod has the file."""
    for fact in ({"fact": "exit", "pid": client}, {"fact": "pod_retired", "name": name}):
        table.note(fact)


def test_a_tsg_of_a_retired_pod_runs_in_nobodys_windows():
    """Its timeslice is the plan's by chance, so none has to be set, and nobody notices that its file is elsewhere."""
    enforcer, engine, _ = card("gone", "a", "b")
    enforcer.adopt(Plan(0, 10 * MS, (PodPlan("gone", PodClass.OFFLINE, abi.RM_DEFAULT_TIMESLICE_US, None),)), 0)
    retire(engine.table, "gone", 1)
    enforcer.adopt(turns("a", "b"), 0)

    seen = []
    for at in (0, 5 * MS, 10 * MS, 15 * MS):
        enforcer.step(at)
        seen.append({key[0] for key in engine.off})

    assert seen == [{1, 3}, {1, 3}, {1, 2}, {1, 2}]


@pytest.mark.parametrize("then", ["no plan", "moved"])
def test_a_tsg_of_a_retired_pod_runs_again_where_it_may(then):
    enforcer, engine, _ = card("gone", "a")
    plan = Plan(0, 10 * MS, (PodPlan("a", PodClass.OFFLINE, 5000, None),))
    enforcer.adopt(plan, 0)
    retire(engine.table, "gone", 1)
    enforcer.refresh(1)
    off = {key[0] for key in engine.off}
    if then == "moved":
        engine.table.note({"fact": "owner", "client": 1, "pod": "a", "pid": 2, "fd": 3})
    enforcer.adopt(plan if then == "moved" else None, 2)

    assert (off, engine.off) == ({1}, set())


def test_gates_follow_the_windows():
    enforcer, engine, _ = card("a", "b")
    enforcer.adopt(turns("a", "b"), 0)

    seen = []
    for at in (0, 5 * MS, 10 * MS, 19 * MS, 20 * MS):
        enforcer.step(at)
        seen.append({key[0] for key in engine.off})

    assert seen == [{2}, {2}, {1}, {1}, {2}]


def test_step_says_when_the_next_edge_is():
    enforcer, _, _ = card("a", "b")
    enforcer.adopt(turns("a", "b"), 0)

    assert enforcer.step(3 * MS) == 7 * MS


@pytest.mark.parametrize(("timeslice_us", "preempted"), [(50, False), (2000, True)])
def test_short_slice_ends_turn_by_itself_long_one_is_preempted(timeslice_us, preempted):
    enforcer, engine, _ = card("a", "b")
    plan = turns("a", "b")
    enforcer.adopt(replace(plan, pods=tuple(replace(pod, timeslice_us=timeslice_us) for pod in plan.pods)), 0)
    engine.preempted.clear()
    enforcer.step(10 * MS)

    assert engine.preempted[0] is preempted


@pytest.mark.parametrize(("works", "preempted"), [(True, False), (False, True)])
def test_kept_window_is_preempted_where_the_next_pod_idles(works, preempted):
    enforcer, engine, used = card("a", "b")
    plan = turns("a", "b")
    enforcer.adopt(replace(plan, pods=tuple(replace(pod, timeslice_us=50) for pod in plan.pods)), 0)
    enforcer.step(10 * MS)
    used["b"] += MS * works
    enforcer.step(20 * MS)
    engine.preempted.clear()
    enforcer.step(30 * MS)

    assert engine.preempted[0] is preempted


def test_without_gates_in_the_plan_nothing_is_ever_due():
    enforcer, engine, _ = card("a")
    enforcer.adopt(Plan(0, 100 * MS, (PodPlan("a", PodClass.OFFLINE, 5000),)), 0)

    assert enforcer.step(1) is None
    assert engine.calls == 0


def test_release_opens_gates_and_restores_each_timeslice():
    enforcer, engine, _ = card("a", "b")
    enforcer.table.note({"fact": "timeslice", "client": 1, "handle": 30, "us": 2048})
    enforcer.adopt(turns("a", "b"), 0)
    enforcer.adopt(None, 5 * MS)

    assert engine.off == set()
    assert engine.slices == {(1, 30): 2048, (2, 30): abi.RM_DEFAULT_TIMESLICE_US}


def test_a_channel_born_behind_a_closed_gate_is_gated():
    enforcer, engine, _ = card("a", "b")
    enforcer.adopt(turns("a", "b"), 0)
    for fact in (object_fact(RmObject(2, 60, 30, 0xC86F)), {"fact": "confirm", "client": 2, "handle": 60}):
        enforcer.table.note(fact)
    enforcer.refresh(1 * MS)

    assert (2, 60) in engine.off


def test_what_a_pod_frees_is_let_run_to_its_end():
    enforcer, engine, _ = card("a", "b")
    enforcer.adopt(turns("a", "b"), 0)
    enforcer.open_for_free([(2, 40)])
    at_once = set(engine.off)
    enforcer.refresh(1 * MS)

    assert at_once == engine.off == {(2, 50)}


def test_what_was_not_freed_after_all_is_gated_again():
    enforcer, engine, _ = card("a", "b")
    enforcer.adopt(turns("a", "b"), 0)
    enforcer.open_for_free([(2, 40)])
    enforcer.cancel_free([(2, 40)])
    enforcer.refresh(1 * MS)

    assert engine.off == {(2, 40), (2, 50)}


def remade(enforcer, engine, *handles):
    """RM has given handles of the second pod to new objects before anybody looked at the card again."""
    classes = {30: (20, abi.KEPLER_CHANNEL_GROUP_A, 1), 40: (30, 0xC86F, 0), 50: (30, 0xC86F, 0)}
    enforcer.table.note({"fact": "gone", "client": 2, "handle": handles[0]})
    for handle in handles:
        engine.counts.pop((2, handle), None)
        engine.slices.pop((2, handle), None)
        enforcer.table.note(object_fact(RmObject(2, handle, *classes[handle])))
        enforcer.table.note({"fact": "confirm", "client": 2, "handle": handle})


def test_channel_with_the_handle_of_a_freed_one_is_gated():
    enforcer, engine, _ = card("a", "b")
    enforcer.adopt(turns("a", "b"), 0)
    enforcer.open_for_free([(2, 40)])
    remade(enforcer, engine, 40)
    enforcer.refresh(1 * MS)

    assert engine.off == {(2, 40), (2, 50)}


def test_channel_with_the_handle_of_a_gated_one_is_gated():
    """RM frees a channel with its address space, and the pod makes another at once."""
    enforcer, engine, _ = card("a", "b")
    enforcer.adopt(turns("a", "b"), 0)
    remade(enforcer, engine, 40)
    enforcer.step(1 * MS)

    assert engine.off == {(2, 40), (2, 50)}


def test_tsg_with_the_handle_of_another_gets_the_plans_timeslice():
    enforcer, engine, _ = card("a", "b")
    parts = (PodPlan("a", PodClass.OFFLINE, 2000), PodPlan("b", PodClass.OFFLINE, 500))
    enforcer.adopt(Plan(0, 10 * MS, parts), 0)
    remade(enforcer, engine, 30, 40, 50)
    enforcer.refresh(1 * MS)

    assert engine.slices[2, 30] == 500


def test_a_pod_that_died_is_no_trouble_to_its_neighbours():
    enforcer, engine, _ = card("a", "b")
    enforcer.adopt(turns("a", "b"), 0)
    enforcer.table.note({"fact": "exit", "pid": 2})
    engine.counts.clear()
    enforcer.step(10 * MS)

    assert engine.off == {(1, 40), (1, 50)}


def test_a_new_plan_of_the_same_period_goes_on_at_the_same_phase():
    enforcer, engine, _ = card("a", "b")
    enforcer.adopt(turns("a", "b"), 0)
    enforcer.adopt(turns("a", "b", on_idle=OnIdle.YIELD), 13 * MS)

    assert {key[0] for key in engine.off} == {1}


def test_an_idle_pods_yielded_window_is_lent_and_taken_back():
    enforcer, engine, used = card("a", "b")
    enforcer.adopt(turns("a", "b", on_idle=OnIdle.YIELD), 0)
    off = []
    for period in range(4):
        for at in (0, 10 * MS):
            enforcer.step(period * 20 * MS + at)
            off.append({key[0] for key in engine.off})
            if at == 0:
                used["a"] += MS  # b never runs until the third period
            if period == 2:
                used["b"] += MS

    assert off[:2] == [{2}, {1}]  # first period: nobody is known to be idle
    assert off[3] == set()  # b let its window go by: a may run in it, and so may b
    assert off[-1] == {1}  # b ran: its window is its own again


def test_gates_do_not_wait_for_the_log_and_who_ran_is_told_by_it():
    enforcer, engine, used = card("a", "b")
    running, off = [], []

    def drain(now_ns):
        off.append({key[0] for key in engine.off})
        used[running[-1]] += MS

    enforcer.drain = drain
    enforcer.adopt(turns("a", "b", on_idle=OnIdle.YIELD), 0)
    for at, ran in ((10, "a"), (20, "b"), (30, "a"), (40, "b")):
        running.append(ran)  # what it did in the turn that ends now is not in the log as read before
        enforcer.step(at * MS)

    assert off == [{2}, {1}, {2}]  # a's first turn began with the plan: nothing is told of it


def test_new_pod_with_reused_name_is_not_taken_for_idle():
    enforcer, engine, used = card("a", "b")
    used["a"] = 1000 * MS
    enforcer.adopt(turns("a", "b", on_idle=OnIdle.YIELD), 10 * MS)
    enforcer.step(20 * MS)
    enforcer.adopt(None, 21 * MS)  # a goes with its gate open, and another one comes
    used["a"], used["b"] = 0, 1 * MS
    enforcer.adopt(turns("a", "b", on_idle=OnIdle.YIELD), 40 * MS)
    for at, pod in ((50, "a"), (60, "b")):
        used[pod] += 5 * MS
        enforcer.step(at * MS)

    assert {key[0] for key in engine.off} == {2}


def test_nothing_is_kept_of_a_pod_that_was():
    enforcer, _, used = card("a", "b")
    for number in range(3):
        name, at = f"pod-{number}", 40 * number
        enforcer.table.note({"fact": "pod", "name": name, "grants": {}})
        used[name] = 0
        for step in (0, 5, 15):  # its gate is closed, and opened
            enforcer.adopt(turns("a", name), (at + step) * MS)
        enforcer.table.note({"fact": "pod_retired", "name": name})
        enforcer.forget(name)
        enforcer.step((at + 22) * MS)  # the plan still names it
        enforcer.adopt(turns("a", "b"), (at + 25) * MS)

    assert "pod-" not in repr([getattr(enforcer, member) for member in enforcer.__slots__ if member != "gpu_ops"])


def test_a_gate_that_would_not_open_is_tried_again_until_it_does():
    enforcer, engine, _ = card("a", "b")
    enforcer.adopt(turns("a", "b"), 0)
    engine.broken = True
    enforcer.adopt(None, 1 * MS)
    wait = enforcer.step(2 * MS)
    engine.broken = False
    enforcer.step(2 * MS + RETRY_NS)

    assert wait == RETRY_NS
    assert engine.off == set()
    assert enforcer.step(3 * MS + RETRY_NS) is None


def with_tsgs(table, client, count):
    """Give a pod that many further TSGs."""
    for handle in range(1000, 1000 + count):
        table.note(object_fact(RmObject(client, handle, 20, abi.KEPLER_CHANNEL_GROUP_A, 1)))
        table.note({"fact": "confirm", "client": client, "handle": handle})


def slices(*pods_us):
    """Give pods timeslices."""
    return Plan(0, 10 * MS, tuple(PodPlan(name, PodClass.OFFLINE, us, None) for name, us in pods_us))


def test_many_timeslices_are_set_in_steps():
    """RM takes half a millisecond for each, and nobody else is served meanwhile."""
    enforcer, engine, _ = card("a", "b")
    with_tsgs(engine.table, 1, 2 * _AT_ONCE)
    enforcer.adopt(slices(("a", 5000), ("b", 6000)), 0)
    done, waits = [len(engine.slices)], []
    for at in (1, 2):
        waits.append(enforcer.step(at))
        done.append(len(engine.slices))

    assert (done, waits) == ([_AT_ONCE, 2 * _AT_ONCE, 2 * _AT_ONCE + 2], [0, None])
    assert engine.slices[2, 30] == 6000


def test_a_step_of_slow_timeslices_ends_early(monkeypatch):
    """A pod can put other files in the places where its clients' files were."""
    clock = SimpleNamespace(ns=0, monotonic_ns=lambda: clock.ns)
    monkeypatch.setattr(enforcer_module, "time", clock)
    monkeypatch.setattr(enforcer_module, "_STEP_NS", 10 * MS)
    enforcer, engine, _ = card("a", "b")
    with_tsgs(engine.table, 1, 2 * _AT_ONCE)

    def slow(tsg, us):
        clock.ns += 4 * MS
        return engine.slices.setdefault(tsg.key, us) == us

    engine.timeslice = slow
    enforcer.adopt(slices(("a", 5000), ("b", 6000)), 0)

    assert len(engine.slices) == 3


def test_a_newer_plans_timeslices_are_set_in_the_end():
    enforcer, engine, _ = card("a", "b")
    with_tsgs(engine.table, 1, 2 * _AT_ONCE)
    enforcer.adopt(slices(("a", 5000), ("b", 6000)), 0)
    at = 0
    enforcer.adopt(slices(("a", 7000), ("b", 8000)), at)
    while enforcer.step(at := at + 1) is not None:
        pass

    assert set(engine.slices.values()) == {7000, 8000}


def test_timeslices_that_fail_delay_no_others():
    """A pod's clients whose files are elsewhere come first, whenever something changes."""
    enforcer, engine, _ = card(*(f"pod-{n}" for n in range(2 * _AT_ONCE)), "z")
    last = 2 * _AT_ONCE + 1
    engine.timeslice = lambda tsg, us: tsg.client == last and engine.slices.setdefault(tsg.key, us) == us
    plan = slices(*((f"pod-{n}", 5000) for n in range(2 * _AT_ONCE)), ("z", 6000))
    for at in range(2):
        enforcer.adopt(plan, at)

    assert engine.slices == {(last, 30): 6000}


def closings(enforcer, engine, periods):
    """Run turns of two pods to the letter; return when in each period, in ms, the first one's gate began to close."""
    at_ns, began = 0, []
    while at_ns < periods * 20 * MS:
        was = set(engine.off)
        wait = enforcer.step(at_ns)
        if {(1, 40)} <= engine.off - was:
            began.append(at_ns % (20 * MS) / MS)
        at_ns += wait
    return began


def test_slow_gate_closes_earlier_until_it_is_fast_again():
    enforcer, engine, _ = card("a", "b")
    engine.took_ns = 4 * MS
    enforcer.adopt(turns("a", "b"), 0)

    assert closings(enforcer, engine, 3) == [10, 6, 6]
    engine.took_ns = MS
    assert closings(enforcer, engine, 4) == [6, 7.5, 10, 10]


def test_one_slow_closing_is_hardly_believed():
    """It waited for another pod's call, which holds RM's lock."""
    enforcer, engine, _ = card("a", "b")
    engine.took_ns = MS
    enforcer.adopt(turns("a", "b"), 0)
    assert closings(enforcer, engine, 2) == [10, 10]

    engine.took_ns = 40 * MS
    assert closings(enforcer, engine, 1) == [10]
    engine.took_ns = MS
    assert closings(enforcer, engine, 3) == [6, 7.5, 10]


def moves_in_order(enforcer, engine, now_ns):
    """Take a step; return for each call that moved gates the pods' clients and whether it closed them."""
    moved, gate = [], engine.gate

    def seen(device, channels, *, closed, preempt=True):
        moved.append(({client for client, _ in channels}, closed))
        return gate(device, channels, closed=closed, preempt=preempt)

    engine.gate = seen
    enforcer.step(now_ns)
    engine.gate = gate
    return moved


def test_the_next_pods_gate_opens_before_the_last_ones_closes():
    enforcer, engine, _ = card("a", "b")
    enforcer.adopt(turns("a", "b"), 0)
    engine.took_ns = 1 * MS

    assert moves_in_order(enforcer, engine, 10 * MS) == [({2}, False), ({1}, True)]
    assert enforcer.take_closed("b", 15 * MS) == [(0, 11 * MS)]
    assert enforcer.take_closed("a", 15 * MS) == [(12 * MS, 15 * MS)]


def test_gates_that_rm_is_slow_to_open_go_last():
    """A pod could lengthen an accomplice's turn otherwise."""
    enforcer, engine, _ = card("a", "b")
    enforcer.adopt(turns("a", "b"), 0)
    engine.took_ns = 2 * MS
    enforcer.step(10 * MS)
    enforcer.step(20 * MS)
    engine.took_ns = MS

    assert moves_in_order(enforcer, engine, 30 * MS) == [({1}, True), ({2}, False)]
    assert moves_in_order(enforcer, engine, 40 * MS) == [({2}, True), ({1}, False)]
    assert moves_in_order(enforcer, engine, 50 * MS) == [({2}, False), ({1}, True)]


def test_gates_close_first_beside_an_online_pod():
    enforcer, engine, _ = card("a", "b")
    plan = turns("a", "b")
    online = PodPlan("o", PodClass.ONLINE, 5000)
    enforcer.adopt(replace(plan, pods=(*plan.pods, online)), 0)

    assert moves_in_order(enforcer, engine, 10 * MS) == [({1}, True), ({2}, False)]


def test_gates_close_first_where_slices_are_the_shortest():
    enforcer, engine, _ = card("a", "b")
    plan = turns("a", "b")
    parts = tuple(replace(part, timeslice_us=50 if part.pod == "a" else 5000) for part in plan.pods)
    enforcer.adopt(replace(plan, pods=parts), 0)

    assert moves_in_order(enforcer, engine, 10 * MS) == [({1}, True), ({2}, False)]
    assert moves_in_order(enforcer, engine, 20 * MS) == [({1}, False), ({2}, True)]


def test_gates_that_take_several_calls_to_open_go_last():
    enforcer, engine, _ = card("a", "b")
    for channel in range(100, 100 + abi.MAX_DISABLE_CHANNELS):
        enforcer.table.note(object_fact(RmObject(2, channel, 30, 0xC86F)))
        enforcer.table.note({"fact": "confirm", "client": 2, "handle": channel})
    enforcer.adopt(turns("a", "b"), 0)

    assert moves_in_order(enforcer, engine, 10 * MS) == [({1}, True), ({2}, False)]


def test_gated_time_is_reported_once():
    enforcer, _, _ = card("a", "b")
    enforcer.adopt(turns("a", "b"), 0)
    enforcer.step(10 * MS)

    assert enforcer.take_closed("b", 12 * MS) == [(0, 10 * MS)]
    assert enforcer.take_closed("a", 12 * MS) == [(10 * MS, 12 * MS)]
    assert enforcer.take_closed("a", 15 * MS) == [(12 * MS, 15 * MS)]


def test_time_between_switches_belongs_to_who_was_resident():
    counter = GpuTimeCounter()
    counter.advance([Event(10, "a", True), Event(30, "a", False), Event(35, "b", True)], 50)

    assert counter.take() == {"a": GpuTime(20, 1, 20), "b": GpuTime(15, 1)}


def test_a_switch_reported_late_is_not_charged_twice():
    counter = GpuTimeCounter()
    counter.advance([Event(0, "a", True)], 100)
    counter.advance([Event(90, "a", False), Event(95, "b", True)], 200)

    assert sum(use.run_ns for use in counter.totals.values()) == 200


def test_direct_context_handover_on_engine_is_counted():
    counter = GpuTimeCounter()
    handed = [Event(0, "a", True), Event(MS, "a", False), Event(MS + 84_000, "b", True), Event(2 * MS, "b", False)]
    counter.advance([*handed, Event(2 * MS, "b", True), Event(9 * MS, "b", False), Event(11 * MS, "a", True)], 12 * MS)

    assert counter.take_handovers() == {("a", "b"): 1}, "not b's own restart, not a's start on an idle engine"
    assert counter.take_handovers() == {}


@given(st.lists(st.tuples(st.integers(0, 1000), st.sampled_from("abc"), st.booleans()), max_size=30), st.data())
def test_the_meter_never_hands_out_more_time_than_passed(story, data):
    counter, now = GpuTimeCounter(), 0
    for chunk in range(3):
        events = [Event(at + chunk * 1000, who, start) for at, who, start in sorted(story)]
        now = data.draw(st.integers(chunk * 1000, chunk * 1000 + 2000))
        counter.advance(events, now)

    assert sum(use.run_ns for use in counter.totals.values()) <= max(now, 3000)


@pytest.mark.parametrize("tsgs", [1, 3])
def test_a_timeslice_is_set_once_and_not_again(tsgs):
    enforcer, engine, _ = card(*"abc"[:tsgs])
    plan = Plan(0, 100 * MS, tuple(PodPlan(name, PodClass.OFFLINE, 7000) for name in "abc"[:tsgs]))
    enforcer.adopt(plan, 0)
    engine.slices.clear()
    enforcer.adopt(plan, MS)

    assert engine.slices == {}
