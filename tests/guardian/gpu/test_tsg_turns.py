"""A pod's processes take turns by gate: which channels of its TSGs are off when, and that nothing stays off."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace

import pytest

from qgpu.guardian.accounting.rm_object import RmObject, object_fact
from qgpu.guardian.gpu.enforcer import RETRY_NS, Enforcer
from qgpu.guardian.gpu.gpu import Gpu
from qgpu.model import MIN_TIMESLICE_US, NS_PER_MS, Plan, PodClass, PodPlan, Window
from qgpu.model.tsg_turns import CHECK_NS
from qgpu.nvidia import abi
from qgpu.nvidia.gpu_time import GpuTime
from tests.guardian.gpu.test_enforcer import Engine, card

MS = NS_PER_MS
TURN = 100 * MS


class Pod:
    """A pod "a" of several processes on a card whose time passes."""

    def __init__(self, processes: int, *, windows: tuple[Window, ...] | None = None, slice_us: int = 50) -> None:
        made = card(*["a"] * processes)
        self.enforcer: Enforcer = made[0]
        self.engine: Engine = made[1]
        self.used: dict[object, int] = made[2]
        part = PodPlan("a", PodClass.OFFLINE, slice_us, windows, tsg_turn_ns=TURN)
        self.plan = Plan(0, 400 * MS, (part,))
        self.now_ns = 0
        self.enforcer.adopt(self.plan, 0)

    @property
    def off(self) -> set[int]:
        """Return which processes have their channels off; each is client so-and-so."""
        off = {key[0] for key in self.engine.off}
        assert self.engine.off == {(client, handle) for client in off for handle in (40, 50)}
        return off

    def run(self, length_ns: int, busy: Collection[int]) -> list[tuple[int, set[int]]]:
        """Let time pass in which these processes have work; return when which were off, in ms, as it changed."""
        end_ns, story = self.now_ns + length_ns, []
        while self.now_ns < end_ns:
            wait_ns = self.enforcer.step(self.now_ns)
            if not story or story[-1][1] != self.off:
                story.append((self.now_ns // MS, self.off))
            passed_ns = end_ns - self.now_ns if wait_ns is None else min(end_ns - self.now_ns, wait_ns)
            for client in set(busy) - self.off:
                self.used[client, 30] = self.used.get((client, 30), 0) + passed_ns
            self.now_ns += passed_ns
        return story


def test_processes_take_turns_from_the_first_look_on() -> None:
    pod = Pod(3)

    assert pod.run(360 * MS, {1, 2, 3}) == [(0, set()), (50, {2, 3}), (150, {1, 3}), (250, {1, 2}), (350, {2, 3})]


@pytest.mark.parametrize(("slice_us", "preempts"), [(MIN_TIMESLICE_US, False), (500, True)])
def test_a_handover_is_one_closing_and_one_opening_call(slice_us: int, preempts: bool) -> None:
    pod = Pod(4, slice_us=slice_us)
    pod.run(120 * MS, {1, 2, 3, 4})
    pod.engine.calls, pod.engine.preempted = 0, []
    pod.run(100 * MS, {1, 2, 3, 4})

    assert pod.engine.calls == 2
    assert pod.engine.preempted == [preempts, True]  # where it opens it is not asked


def test_one_busy_process_has_no_gate_moved() -> None:
    pod = Pod(3)
    story = pod.run(1000 * MS, {2})

    assert story == [(0, set())]
    assert pod.engine.calls == 0


def test_a_lone_process_is_not_looked_at() -> None:
    pod = Pod(1)
    pod.enforcer.drain = lambda now_ns: pytest.fail("nothing to learn")
    pod.run(1000 * MS, {1})

    assert pod.enforcer.step(pod.now_ns) is None


def test_an_idle_process_lends_its_turn_until_it_has_work() -> None:
    pod = Pod(2)
    pod.run(300 * MS, {1, 2})
    lent = pod.run(500 * MS, {1})
    back = pod.run(200 * MS, {1, 2})

    assert lent[-1][1] == back[0][1] == set()
    assert lent[-1][0] <= 300 + (TURN + CHECK_NS) // MS
    assert back[1][0] <= 800 + CHECK_NS // MS
    assert {frozenset(off) for _, off in back} == {frozenset(), frozenset({1}), frozenset({2})}


def test_a_process_that_comes_is_open_at_once() -> None:
    pod = Pod(2)
    pod.run(100 * MS, {1, 2})
    facts = [
        {"fact": "process", "pid": 3, "pod": "a"},
        {"fact": "client", "client": 3, "pid": 3, "fd": 3},
        object_fact(RmObject(3, 20, 3, abi.NV01_DEVICE_0, 0)),
        object_fact(RmObject(3, 30, 20, abi.KEPLER_CHANNEL_GROUP_A, 1)),
        object_fact(RmObject(3, 40, 30, 0xC86F)),
        object_fact(RmObject(3, 50, 30, 0xC86F)),
        *({"fact": "confirm", "client": 3, "handle": handle} for handle in (20, 30, 40, 50)),
    ]
    for fact in facts:
        pod.enforcer.table.note(fact)
    pod.enforcer.refresh(pod.now_ns)

    assert pod.off == {2}
    assert pod.run(60 * MS, {1, 2, 3})[-1][1] >= {3}


def test_a_tsg_being_freed_is_opened_and_others_go_on() -> None:
    pod = Pod(3)
    pod.run(60 * MS, {1, 2, 3})
    pod.enforcer.open_for_free([(2, 40), (2, 50)])
    assert pod.off == {3}
    pod.run(MS, {1, 2, 3})
    assert pod.off == {3}

    for client in (2, 1):  # one that waited for its turn, and who had it
        pod.enforcer.table.note({"fact": "exit", "pid": client})
        for handle in (50, 40, 30, 20):
            pod.enforcer.table.note({"fact": "gone", "client": client, "handle": handle})
    pod.enforcer.refresh(pod.now_ns)
    assert not {key for key in pod.engine.off if key in pod.enforcer.table.objects}


def test_what_was_not_freed_after_all_rests_again() -> None:
    pod = Pod(2)
    pod.run(60 * MS, {1, 2})
    pod.enforcer.open_for_free([(2, 40)])
    pod.enforcer.cancel_free([(2, 40)])
    pod.run(MS, {1, 2})

    assert pod.off == {2}


@pytest.mark.parametrize("ends", ["lease", "turns", "pod's part"])
def test_all_are_open_when_nothing_asks_for_turns_any_more(ends: str) -> None:
    pod = Pod(4)
    pod.run(120 * MS, {1, 2, 3, 4})
    (part,) = pod.plan.pods
    after = {
        "lease": None,
        "turns": replace(pod.plan, pods=(replace(part, tsg_turn_ns=None),)),
        "pod's part": replace(pod.plan, pods=()),
    }
    pod.enforcer.adopt(after[ends], pod.now_ns)

    assert pod.off == set()
    assert pod.engine.counts == dict.fromkeys(pod.engine.counts, 0)
    assert pod.enforcer.step(pod.now_ns) is None


def test_a_gate_that_would_not_move_is_tried_again() -> None:
    pod = Pod(2)
    pod.engine.broken = True
    pod.run(51 * MS, {1, 2})
    pod.engine.broken = False
    pod.run(RETRY_NS, {1, 2})

    assert pod.off in ({1}, {2})


def test_turns_nest_in_windows_and_count_as_open() -> None:
    pod = Pod(2, windows=(Window(0, 100 * MS),))
    pod.run(400 * MS, {1, 2})
    before = dict(pod.used)
    story = pod.run(1600 * MS, {1, 2})

    assert {at % 400 for at, off in story if off == {1, 2}} == {100}
    assert {frozenset(off) for at, off in story if at % 400 < 100} == {frozenset({1}), frozenset({2})}
    assert [pod.used[client, 30] - before[client, 30] for client in (1, 2)] == [200 * MS, 200 * MS]
    assert sum(end - start for start, end in pod.enforcer.take_closed("a", pod.now_ns)) == 5 * 300 * MS


def test_renewed_or_changed_plan_continues_current_tsg_turn() -> None:
    pod = Pod(2)
    pod.run(100 * MS, {1, 2})
    pod.enforcer.adopt(replace(pod.plan, period_ns=200 * MS), pod.now_ns)

    assert pod.run(100 * MS, {1, 2}) == [(100, {2}), (150, {1})]


def test_a_cards_meter_tells_what_each_tsg_of_a_pod_had() -> None:
    table = card("a", "a", "b")[0].table
    metered = Gpu(0, SimpleNamespace(instance=0), table, None, None, lambda keys: None)  # type: ignore[arg-type]
    metered.gpu_time.counter.totals = {
        (0, 2): GpuTime(5 * MS),
        (7, 2): GpuTime(MS),
        (0, 3): GpuTime(9 * MS),
        (0, 99): GpuTime(MS),
    }

    assert metered.enforcer.tsgs_used_ns("a") == {(1, 30): 0, (2, 30): 6 * MS}


def test_time_of_a_process_is_not_of_the_pod_whose_file_it_has() -> None:
    """Where RM tells no contexts, time goes by process; a pod's process may use another pod's client first."""
    table = card("a", "b")[0].table
    table.note({"fact": "client", "client": 1, "pid": 2, "fd": 9})
    metered = Gpu(0, SimpleNamespace(instance=0), table, None, None, lambda keys: None)  # type: ignore[arg-type]
    metered.gpu_time.counter.totals = {(0, 2): GpuTime(5 * MS)}

    assert [metered.enforcer.tsgs_used_ns(pod) for pod in "ab"] == [{(1, 30): 0}, {(2, 30): 5 * MS}]


def test_contexts_that_a_process_made_and_freed_have_one_total() -> None:
    """A process can make any number, and each window that opens or closes adds up all totals."""
    table = card("a", "a", "b")[0].table
    device = SimpleNamespace(instance=0, time_ns=lambda: 0)
    metered = Gpu(0, device, table, None, SimpleNamespace(dropped=0, read=list), lambda keys: None)  # type: ignore[arg-type]
    metered.gpu_time.counter.totals = {(context, 2): GpuTime(MS, 1, MS) for context in range(100, 200)}
    before = metered.enforcer.tsgs_used_ns("a")
    metered.sample(0)

    assert metered.gpu_time.counter.totals == {(0, 2): GpuTime(100 * MS, 100, MS)}
    assert metered.enforcer.tsgs_used_ns("a") == before


def test_nothing_is_kept_of_a_pod_that_was() -> None:
    pod = Pod(2)
    pod.run(120 * MS, {1, 2})
    pod.enforcer.table.note({"fact": "pod_retired", "name": "a"})
    pod.enforcer.forget("a")
    pod.enforcer.step(pod.now_ns)

    assert "'a'" not in repr(pod.enforcer._tsg_turns)
