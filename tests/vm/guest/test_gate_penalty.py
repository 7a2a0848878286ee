"""What a pod owes for gates that its exits and calls hold open: how much, who pays, and who does not wait."""

from __future__ import annotations

import os
import signal
import threading
import time

import nv
import pytest
import qg
from faults import ENFORCE
from programs import MIB, program
from test_groups import NO_RESOURCES, card, free_tsg, join, server

TIMES, LEAST_TIMES, FURTHER_MAX = 20, 5, 1024
#: How long the driver takes for each end of a process, in seconds.
END = 0.2


@pytest.fixture
def group(qgpu, pod):
    """A pod with a server, and three clients with a handle each on its TSG."""
    made = pod("group")
    named = made.process().run(server)
    for _ in range(3):
        assert made.process().run(join, *named) == 0
    return made


@pytest.fixture
def slow_end(parameter):
    parameter("close_late_us", int(END * 1e6))


def timed_free(state):
    started = time.monotonic()
    state["p"].free(state["tsg"])
    return time.monotonic() - started


def begin_free(state):
    """Free the TSG in a thread of its own."""
    state["thread"] = threading.Thread(target=state["p"].free, args=(state["tsg"],))
    state["thread"].start()


def ended(state):
    return not state["thread"].is_alive()


def closed(qgpu, group):
    qgpu.plan((group.id, 5000, []))
    qg.until(lambda: card() == [(4, 5000)])


def test_an_end_longer_than_a_call_may_cost_is_paid_in_full(group, qgpu, slow_end):
    closed(qgpu, group)
    group.processes[1].kill()

    assert group.processes[0].run(timed_free) > TIMES * END - 1


def test_ends_at_the_same_time_cost_no_more_than_one(group, qgpu, slow_end):
    closed(qgpu, group)
    for process in group.processes[1:]:
        os.kill(process.pid, signal.SIGKILL)
    for process in group.processes[1:]:
        process.kill()

    assert group.processes[0].run(timed_free) < 2.5 * TIMES * END


def test_a_small_end_leaves_the_bill_of_a_shared_one(group, qgpu, parameter):
    """Of a process with a TSG of its own, while the end of one with a handle on the group's lasts."""
    alone = group.process()
    alone.run(server)
    qgpu.plan((group.id, 5000, []))
    qg.until(lambda: card() == [(4, 5000), (1, 5000)])
    parameter("close_late_us", 500000)
    began = time.monotonic()
    group.processes[1].start(lambda state: os.close(state["p"].ctl))
    time.sleep(0.4)
    parameter("close_late_us", 0)
    alone.kill()
    small = time.monotonic() - began
    group.processes[1].result()
    assert small < 0.5

    assert group.processes[0].run(timed_free) > TIMES * 0.5 - 1


def test_an_end_that_lasts_into_the_closed_time_is_paid(group, qgpu, slow_end):
    """The gate is open when the end begins. The driver's part of it takes END, so it lasts until END after the kill."""
    qgpu.plan((group.id, 5000))
    killed = time.monotonic()
    os.kill(group.processes[1].pid, signal.SIGKILL)
    qgpu.plan((group.id, 5000, []))
    least = END - (time.monotonic() - killed)
    group.processes[1].kill()

    assert group.processes[0].run(timed_free) > TIMES * least - END


def test_ends_while_the_gate_is_open_cost_nothing(group, qgpu, slow_end):
    qgpu.plan((group.id, 5000))
    group.processes[1].kill()
    closed_now = time.monotonic()
    qgpu.plan((group.id, 5000, []))
    group.processes[0].run(free_tsg)

    assert time.monotonic() - closed_now < TIMES * END / 2


def test_another_process_ends_while_the_pod_owes(group, qgpu, slow_end):
    closed(qgpu, group)
    group.processes[1].kill()
    group.processes[0].run(begin_free)
    group.processes[2].kill()
    waits = not group.processes[0].run(ended)
    group.processes[0].kill()

    assert waits


def test_calls_of_a_client_go_on_while_a_free_of_it_waits(group, qgpu, slow_end):
    def take(state):
        state["p"].memory(MIB)
        return not state["thread"].is_alive()

    closed(qgpu, group)
    group.processes[1].kill()
    first = group.processes[0]
    first.run(begin_free)

    assert not first.run(take)
    first.kill()


def test_a_call_that_a_pod_prolongs_is_paid_for_as_long(web, qgpu, late):
    """By SCHED_IDLE beside busy threads a call takes as long as its pod likes."""

    def space(state):
        return state["p"].alloc(state["p"].device, nv.VASPACE)

    def timed(state, space):
        started = time.monotonic()
        state["p"].free(space)
        return time.monotonic() - started

    (process,) = web.processes
    process.run(lambda state: state["p"].compute())
    spaces = [process.run(space) for _ in range(2)]
    qgpu.plan((web.id, 5000, []))
    late(int(1e6))
    length = process.run(timed, spaces[0])
    late(0)

    assert process.run(timed, spaces[1]) > LEAST_TIMES * length - 1


@pytest.fixture
def aside():
    """This process leaves the first CPU to others."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before - {0} or before)
    yield
    os.sched_setaffinity(0, before)


def hog(state):
    os.sched_setaffinity(0, {0})
    while True:
        pass


def close_slowly(state):
    """In a thread that hardly runs."""

    def close():
        os.sched_setaffinity(0, {0})
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        os.close(state["p"].ctl)

    threading.Thread(target=close).start()


def test_an_end_that_a_pod_starves_of_its_cpu_is_paid(qgpu, pod, aside):
    """Its gate is open until RM has freed its channels, so its kernels run out of turn."""
    made = pod("web")
    ending, paying, *hogs = (made.process() for _ in range(6))
    for process in (ending, paying):
        process.run(server)
    qgpu.plan((made.id, 5000, []))
    for process in hogs:
        process.start(hog)
    ending.run(close_slowly)
    open_s, then = 0.0, time.monotonic()
    while len(seen := card()) == 2:
        now = time.monotonic()
        open_s += (0, 5000) in seen and now - then
        then = now
    for process in hogs:
        process.kill()

    assert open_s > 0.2
    assert paying.run(timed_free) > LEAST_TIMES * open_s / 2 - 0.2


def test_off_and_on_again_leaves_nothing_owed(group, qgpu):
    closed(qgpu, group)
    time.sleep(1)
    ENFORCE.write_text("0")
    ENFORCE.write_text("1")
    later = group.process()
    later.run(server)
    qgpu.plan((group.id, 5000, []))
    qg.until(lambda: card()[-1] == (1, 5000))

    assert later.run(timed_free) < TIMES / 2


def test_further_handles_of_a_pod_are_bounded_over_all_tsgs(pod):
    def many(state):
        p = state["p"] = nv.Program()
        q = nv.Program()
        taken = 0
        for _ in range(10):
            tsg = p.tsg()
            for _ in range(127):
                try:
                    q.dup(p.client, tsg)
                except nv.RmError as error:
                    return taken, error.status
                taken += 1
        return taken, 0

    assert pod("big").process().run(many) == (FURTHER_MAX, NO_RESOURCES)


def test_a_clients_memory_counts_before_its_maker_knows_it(pod, parameter):
    """RM makes the client, and another thread of the pod uses it before the module has heard of it."""

    def made_early(state, handle):
        p = nv.Program.__new__(nv.Program)
        p.ctl, p.card, p.last = state["p"].ctl, state["p"].card, 0x5D000000
        p.client = handle
        p.send = nv.call
        state["q"] = p

        def make():
            state["p"].alloc(0, nv.ROOT, handle=0)

        state["maker"] = threading.Thread(target=make)
        state["maker"].start()
        time.sleep(0.2)
        p.device = p.alloc(handle, nv.DEVICE, bytes(56))
        p.alloc(p.device, nv.SUBDEVICE, bytes(4))
        p.memory(8 * MIB)
        state["maker"].join()

    web = pod("web", memory=64 * MIB)
    process = web.process()
    process.run(program)
    parameter("next_client", 0xC1D0ABCD)
    parameter("late_us", 600000)
    process.run(made_early, 0xC1D0ABCD)
    parameter("late_us", 0)

    assert web.held() == 8 * MIB
