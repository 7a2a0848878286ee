"""A pod with many TSGs: each costs a plan a control, and the daemon a look."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from pathlib import Path

import nv
import pytest
import qg
from faults import cleared, fault, inject
from programs import MIB, program, status_of

MS = qg.MS

TSGS_MAX = 512
#: Of a client: on one card, without a memory limit and with one, and on all cards.
DEVICES_MAX, LIMITED_DEVICES_MAX, ALL_DEVICES_MAX = 16, 4, 128
SUBDEVICES_MAX = 8
CLIENTS_MAX = 1 << 12


def make_tsgs(state, count):
    """So many TSGs of a copy engine; RM's status for the last."""
    return [status_of(state, "tsg", 9) for _ in range(count)][-1]


def test_a_pod_has_so_many_tsgs_at_most(pod):
    """A plan and a daemon go through all of them."""
    web = pod("web")
    process = web.process()
    process.run(program)
    assert [process.run(make_tsgs, count) for count in (TSGS_MAX, 1)] == [0, nv.NO_MEMORY]
    assert (web.usage().nr_tsgs, len(qg.sim_tsgs())) == (TSGS_MAX, TSGS_MAX)
    process.run(lambda state: state["p"].free(state["p"].last - 1))

    assert [process.run(make_tsgs, 1) for _ in range(2)] == [0, nv.NO_MEMORY]


def make_clients(state, count):
    """So many further clients of the program's file; how many RM made, and its first other status."""
    p, made = state["p"], state.setdefault("clients", [])
    for done in range(count):
        try:
            made.append(p.alloc(0, nv.ROOT, handle=0))
        except nv.RmError as error:
            return done, error.status
    return count, 0


def free_a_client(state):
    p, client = state["p"], state["clients"].pop()
    data = bytearray(struct.pack("IIII", client, 0, client, 0xFFFF))
    nv.call(p.ctl, 0x29, data)
    return struct.unpack("IIII", data)[3]


@pytest.mark.skipif(Path("/proc/lockdep_stats").exists(), reason="too many for a kernel that watches every lock")
def test_a_pod_has_so_many_clients_at_most(pod):
    """RM goes through the clients of all pods, and frees a file's with its lock held."""
    web, other = pod("web"), pod("other")
    process = web.process()
    process.run(program)  # has one

    assert process.run(make_clients, CLIENTS_MAX) == (CLIENTS_MAX - 1, nv.NO_MEMORY)
    assert (web.info().nr_clients, web.info().refused_objects) == (CLIENTS_MAX, 1)
    other.process().run(program)
    assert process.run(free_a_client) == 0
    assert process.run(make_clients, 2) == (1, nv.NO_MEMORY)


def make_devices(state, count, card=0):
    """So many devices on a card; RM's status for each."""
    p = state["p"]
    return [status_of(state, "alloc", p.client, nv.DEVICE, struct.pack("I52x", card)) for _ in range(count)]


@pytest.mark.parametrize(
    ("memory", "most"), [(None, DEVICES_MAX), (64 * MIB, LIMITED_DEVICES_MAX)], ids=["no limit", "limit"]
)
def test_a_client_has_so_many_devices_of_a_card_at_most(pod, memory, most):
    """RM looks through all of a process's objects for each of them, when somebody asks about the process."""
    web = pod("web", memory=memory)
    process = web.process()
    process.run(program)  # has one

    assert process.run(make_devices, most) == [0] * (most - 1) + [nv.NO_RESOURCES]
    assert web.info().refused_objects == 1
    process.run(lambda state: state["p"].free(state["p"].last - 1))
    assert process.run(make_devices, 2) == [0, nv.NO_RESOURCES]
    process.run(program)
    assert process.run(make_devices, 1) == [0]


def test_devices_of_each_card_are_bounded_apart(pod, parameter):
    """A program has a device of each card that it uses, and a host may have many cards."""

    def open_second(state):
        state["second"] = os.open(nv.GPU.format(1), os.O_RDWR)

    parameter("gpus", 2)
    process = pod("web", memory=64 * MIB).process()
    process.run(program)
    process.run(open_second)
    most = LIMITED_DEVICES_MAX

    assert process.run(make_devices, most, 0) == [0] * (most - 1) + [nv.NO_RESOURCES]
    assert process.run(make_devices, most + 1, 1) == [0] * most + [nv.NO_RESOURCES]


def misstate_devices(state, count):
    """So many devices on the card, each as if on another one until RM looks; RM's status for each."""
    p, said = state["p"], []
    for n in range(count):
        block = ctypes.create_string_buffer(struct.pack("I52x", 1 + n % 31), 56)
        late = threading.Timer(0.01, struct.pack_into, ("I", block, 0, 0))
        p.last += 1
        at = ctypes.addressof(block)
        data = bytearray(nv._ALLOC.pack(p.client, p.client, p.last, nv.DEVICE, at, 0, 0, 0, 0xFFFF, 0))
        late.start()
        nv.call(p.ctl, 0x2B, data)
        late.join()
        said.append(nv._ALLOC.unpack(data)[8])
    return said


def test_misstated_cards_are_bounded_together(pod, linger):
    """While calls are not sealed, another thread can name another card after the check."""
    process = pod("web").process()
    process.run(program)
    linger(40000)
    with qg.switched_off(qg.KPROBES):
        said = process.run(misstate_devices, ALL_DEVICES_MAX)
    linger(0)

    assert said == [0] * (ALL_DEVICES_MAX - 1) + [nv.NO_RESOURCES]


def make_subdevices(state, count, device=None):
    """So many subdevices of a device; RM's status for each."""
    p = state["p"]
    return [status_of(state, "alloc", device or p.device, nv.SUBDEVICE, bytes(4)) for _ in range(count)]


def another_device(state):
    return state["p"].alloc(state["p"].client, nv.DEVICE, bytes(56))


def test_a_device_has_so_many_subdevices_at_most(pod):
    """For each piece of memory that RM frees it looks through all of them."""
    web = pod("web")
    process = web.process()
    process.run(program)  # has one
    other = process.run(another_device)
    most = SUBDEVICES_MAX

    assert process.run(make_subdevices, most) == [0] * (most - 1) + [nv.NO_RESOURCES]
    assert process.run(make_subdevices, most + 1, other) == [0] * most + [nv.NO_RESOURCES]
    assert web.info().refused_objects == 2
    process.run(lambda state: state["p"].free(state["p"].subdevice))
    assert process.run(make_subdevices, 2) == [0, nv.NO_RESOURCES]


def test_timeslices_cost_a_daemon_no_lease(qgpu, pod):
    """RM takes its time over each of them, and the daemon renews its plan meanwhile."""
    web = pod("web")
    process = web.process()
    process.run(program)
    process.run(make_tsgs, 40)
    qgpu.events()
    inject([fault("slice", 0, stall_ms=50)])
    qgpu.plan((web.id, 5000, []), lease_ns=1000 * MS)
    qgpu.ioctl("RENEW", gpu=0)
    set_then = [tsg["slice_ns"] for tsg in qg.sim_tsgs()].count(5_000_000)
    cleared()

    qg.until(lambda: [tsg["slice_ns"] for tsg in qg.sim_tsgs()] == [5_000_000] * 40)
    assert set_then < 40
    assert qg.N["QGPU_EVENT_LEASE_LAPSED"] not in [event.type for event in qgpu.events()]


@pytest.fixture
def few_channels():
    parameter = Path("/sys/module/qgpu/parameters/channels_max")
    before = parameter.read_text()
    parameter.write_text("20")
    yield
    parameter.write_text(before)


def channels(state, tsgs, each):
    """RM's status for each of so many channels in each of so many TSGs; the channels are kept."""
    p = state["p"]
    statuses = []
    for _ in range(tsgs):
        tsg = p.tsg()
        for _ in range(each):
            try:
                state.setdefault("channels", []).append(p.channel(tsg))
                statuses.append(0)
            except nv.RmError as error:
                statuses.append(error.status)
    return statuses


def test_channels_beyond_the_maximum_of_a_pod_are_refused(pod, few_channels):
    web = pod("web")
    first, second = web.process(), pod("other").process()
    first.run(program)
    second.run(program)

    assert first.run(channels, 4, 6) == [0] * 20 + [nv.NO_MEMORY] * 4
    assert second.run(channels, 1, 6) == [0] * 6
    first.run(lambda state: state["p"].free(state["channels"].pop()))
    assert first.run(channels, 1, 2) == [0, nv.NO_MEMORY]
    assert web.usage().nr_channels == 20


def test_a_pod_is_removed_before_timeslices_of_others_are_set(qgpu, pod):
    """A pod can make TSGs faster than RM sets their timeslices; the daemon must not hang meanwhile."""
    web, other = pod("web"), pod("other")
    process = web.process()
    process.run(program)
    process.run(make_tsgs, 400)
    inject([fault("slice", 0, stall_ms=20)])  # 8 seconds for all
    qgpu.plan((web.id, 5000, []), lease_ns=30_000 * MS)
    qgpu.ioctl("POD_REMOVE", pod=other.id)
    set_then = [tsg["slice_ns"] for tsg in qg.sim_tsgs()].count(5_000_000)
    cleared()

    assert set_then < 400
