"""What an edge costs that moves the gates of many clients, and what their neighbours see of it."""

from __future__ import annotations

import copy
import os
import threading
import time
from pathlib import Path

import nv
import pytest
import qg

MS = qg.MS
CLIENTS = 100

pytestmark = pytest.mark.quiet


def clients(state, number):
    state["all"] = [nv.Program() for _ in range(number)]
    for p in state["all"]:
        _, (channel,) = p.compute()
        p.submit(channel, 1000)


@pytest.fixture
def many(pod):
    made = pod("many")
    made.process().run(clients, CLIENTS)
    return made


def gate_calls():
    return int(Path("/sys/module/nvidia/parameters/gate_calls").read_text())


def off(of):
    return sum(tsg["off"] for tsg in qg.sim_tsgs() if tsg["client"] in of)


def open_other(qgpu, many, other):
    """An edge at which gates close first: beside an online pod."""
    qgpu.plan((many.id, 1000, []), (other.id, 1000), online={other.id})


def test_edge_of_many_clients_costs_a_control_for_64_channels(qgpu, many, parameter, figure):
    parameter("gate_us", 450)
    qgpu.plan((many.id, 1000))
    times = []
    for _ in range(5):
        for windows in ([[]], []):
            parameter("gate_calls", 0)
            began = time.monotonic()
            qgpu.plan((many.id, 1000, *windows))
            times.append(time.monotonic() - began)
            assert gate_calls() == 2
            assert sum(tsg["off"] for tsg in qg.sim_tsgs()) == (CLIENTS if windows else 0)
    figure("edge_ms_100_clients", sorted(times)[len(times) // 2] * 1000)


def test_a_driver_that_wants_a_control_for_each_client_gets_it(qgpu, many, parameter):
    parameter("gate_own_clients", 1)
    for _ in range(6):  # after a few it is not asked for more
        qgpu.plan((many.id, 1000, []))
        assert sum(tsg["off"] for tsg in qg.sim_tsgs()) == CLIENTS
        qgpu.plan((many.id, 1000))
        assert sum(tsg["off"] for tsg in qg.sim_tsgs()) == 0
    parameter("gate_calls", 0)
    qgpu.plan((many.id, 1000, []))

    assert gate_calls() == CLIENTS


def test_neighbours_open_before_a_long_closing_is_done(qgpu, many, pod, parameter):
    parameter("gate_own_clients", 1)
    other = pod("other")
    other.process().run(clients, 1)
    theirs = {tsg.client for tsg in qgpu.tsgs(other.id)}
    ours = {tsg.client for tsg in qgpu.tsgs(many.id)}
    qgpu.plan((many.id, 1000), (other.id, 1000, []))
    parameter("gate_us", 5000)
    edge = threading.Thread(target=open_other, args=(qgpu, many, other))
    edge.start()
    seen = set()
    while edge.is_alive():
        seen.add((off(theirs) == 0, off(ours) == CLIENTS))
    edge.join()

    assert (True, False) in seen
    assert (off(theirs), off(ours)) == (0, CLIENTS)


def channels(state, number):
    """Channels of one client, in TSGs as large as RM lets them be."""
    p = state["p"] = nv.Program()
    state["tsgs"] = [p.compute(128)[0] for _ in range(number // 128)]


def restart(state):
    """RM puts back one TSG's channels, and the module all of the client's before it closes them again."""
    state["p"].control(state["tsgs"][0], 0xA06C0101, bytes(2))


def test_neighbours_open_before_many_restarted_channels_close(qgpu, pod, parameter):
    many, other = pod("many"), pod("other")
    many.process().run(channels, 384)
    other.process().run(clients, 1)
    theirs = {tsg.client for tsg in qgpu.tsgs(other.id)}
    qgpu.plan((many.id, 1000, []), (other.id, 1000, []))
    parameter("gate_us", 20000)
    parameter("gate_calls", 0)
    many.processes[0].start(restart)
    qg.until(gate_calls)
    edge = threading.Thread(target=open_other, args=(qgpu, many, other))
    edge.start()
    qg.until(lambda: off(theirs) == 0)
    calls = gate_calls()
    edge.join()
    many.processes[0].result()

    assert calls < 384 // 64


def clients_of_one_file(state, number):
    state["p"] = nv.Program()
    for _ in range(number):
        p = copy.copy(state["p"])
        p.client = p.alloc(0, nv.ROOT, handle=0)
        p.device = p.alloc(p.client, nv.DEVICE, bytes(56))
        p.subdevice = p.alloc(p.device, nv.SUBDEVICE, bytes(4))
        p.compute()


def test_a_file_that_ends_opens_all_its_gates_at_once(qgpu, pod, parameter):
    """Else the first would stay open for as long as it takes to open the others."""
    many = pod("many")
    many.process().run(clients_of_one_file, CLIENTS)
    qgpu.plan((many.id, 1000, []))
    parameter("gate_calls", 0)
    many.processes[0].run(lambda state: os.close(state["p"].ctl))

    assert qg.sim_tsgs() == []
    assert gate_calls() <= CLIENTS // 10


def test_one_bad_channel_costs_its_neighbours_one_control_each(qgpu, pod, parameter):
    """RM refuses the batch for the sake of one channel, and then each is asked for by pod, by client, and alone."""
    pods = [pod(name) for name in "abcd"]
    for each in pods:
        each.process().run(clients, 4)
    parameter("gate_misses", 9)
    parameter("gate_calls", 0)
    qgpu.plan(*((each.id, 1000, []) for each in pods))

    assert sum(tsg["off"] for tsg in qg.sim_tsgs()) == 16
    assert gate_calls() <= 16
