"""What lies on the card and has no handle: page tables that RM makes, and what it takes for each TSG."""

from __future__ import annotations

import ctypes
import errno
import struct
import threading

import nv
import pytest
import qg
from programs import MIB, program, take

SPACE, NOT_SUPPORTED = 0x50A0, 0x56
VIRTUAL, LAZY, MANAGED_ELSEWHERE, SPARSE = 0x80000, 0x400, 0x400000, 0x4000000
GIB = 1 << 30


def as_object(state, flags, size, cls=SPACE):
    try:
        state["p"].alloc(state["p"].device, cls, struct.pack("8xI52xQ56x", flags, size))
    except nv.RmError as error:
        return error.status
    return 0


def of_the_heap(state, flags, size):
    p = state["p"]
    p.last += 1
    return struct.unpack_from("I", p.heap(2, w44=p.last, w52=flags, u88=size), 20)[0]


def map_by_rm(state, size, wrapped):
    data = bytearray(size)
    struct.pack_into("I", data, 0, state["p"].client)
    try:
        (nv.xfer if wrapped else nv.call)(state["p"].ctl, 0x57, data)
    except OSError as error:
        return error.errno
    return 0


@pytest.mark.parametrize("ask", [as_object, of_the_heap])
@pytest.mark.parametrize("flags", [VIRTUAL, VIRTUAL | LAZY | SPARSE])
def test_address_space_with_own_page_tables_refused_under_limit(web, ask, flags):
    assert web.processes[0].run(ask, flags, 64 * GIB) == NOT_SUPPORTED
    assert (qg.used(), web.info().refused_allocs) == (0, 1)


@pytest.mark.parametrize("ask", [as_object, of_the_heap])
@pytest.mark.parametrize("flags", [VIRTUAL | LAZY, VIRTUAL | MANAGED_ELSEWHERE, 0x8C415], ids=["lazy", "uvm", "cuda"])
def test_address_space_whose_page_tables_come_later_is_made(web, ask, flags):
    assert web.processes[0].run(ask, flags, 64 * GIB) == 0


def test_flags_exchanged_after_the_check_gain_nothing(web, linger):
    """They stand behind a pointer, which RM follows after us."""

    def race(state, flags, size):
        p = state["p"]
        block = ctypes.create_string_buffer(struct.pack("8xI52xQ56x", flags, size), 128)
        late = threading.Timer(0.05, lambda: struct.pack_into("I", block, 8, 0x80000))
        p.last += 1
        at = ctypes.addressof(block)
        data = bytearray(nv._ALLOC.pack(p.client, p.device, p.last, 0x50A0, at, 0, 0, 0, 0xFFFF, 0))
        late.start()
        nv.call(p.ctl, 0x2B, data)
        late.join()
        return nv._ALLOC.unpack(data)[8]

    linger(300000)

    assert web.processes[0].run(race, VIRTUAL | LAZY, 64 * GIB) == 0
    assert qg.used() == 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_mappings_by_rm_are_refused_under_a_limit(web, pod, wrapped):
    free = pod("free").process()
    free.run(program)

    assert web.processes[0].run(map_by_rm, 64, wrapped) == errno.EOPNOTSUPP
    assert qg.used() == 0
    assert free.run(map_by_rm, 64, wrapped) == 0


def tsg(state, engine):
    try:
        return state["p"].tsg(engine)
    except nv.RmError as error:
        return -error.status


def bare_channel(state, engine):
    """A channel without a TSG of its own: RM makes one for it."""
    params = bytearray(368)
    struct.pack_into("I", params, 128, engine)
    try:
        return state["p"].alloc(state["p"].device, nv.CHANNEL, bytes(params))
    except nv.RmError as error:
        return -error.status


@pytest.mark.parametrize("make", [tsg, bare_channel])
def test_what_rm_takes_for_a_tsg_is_charged_until_it_goes(web, make):
    (process,) = web.processes
    compute, copy = process.run(make, 1), process.run(make, 9)
    assert web.held() == (16 + 1) * MIB
    process.run(lambda state, handle: state["p"].free(handle), compute)
    assert web.held() == MIB
    process.run(lambda state, handle: state["p"].free(handle), copy)

    assert web.held() == 0


@pytest.mark.parametrize("make", [tsg, bare_channel])
def test_a_tsg_has_no_place_beyond_the_limit(web, make):
    (process,) = web.processes
    process.run(take, 50 * MIB)
    before = qg.sim()["objects"]

    assert process.run(make, 1) == -nv.NO_MEMORY
    assert (web.held(), qg.sim()["objects"]) == (50 * MIB, before)
    assert process.run(make, 9) > 0


def test_an_engine_exchanged_after_the_check_gains_nothing(web, linger):
    def race(state):
        p = state["p"]
        block = ctypes.create_string_buffer(struct.pack("12xI4x", 9), 20)
        late = threading.Timer(0.05, lambda: struct.pack_into("I", block, 12, 1))
        p.last += 1
        at = ctypes.addressof(block)
        data = bytearray(nv._ALLOC.pack(p.client, p.device, p.last, nv.TSG, at, 0, 0, 0, 0xFFFF, 0))
        late.start()
        nv.call(p.ctl, 0x2B, data)
        late.join()
        return nv._ALLOC.unpack(data)[8]

    linger(300000)

    assert web.processes[0].run(race) == 0
    assert qg.used() <= web.held() == MIB


@pytest.mark.parametrize("engine", [9, 1], ids=["copy", "compute"])
def test_compute_is_had_only_in_a_tsg_for_compute(web, engine):
    """Its buffers are charged by that."""

    def compute(state, engine):
        p = state["p"]
        channel = p.channel(p.tsg(engine))
        try:
            p.alloc(channel, 0xCBC0)
        except nv.RmError as error:
            return error.status
        return 0

    assert web.processes[0].run(compute, engine) == (0 if engine == 1 else nv.BAD_ARGUMENT)


def test_a_channel_of_an_old_class_is_refused(web, qgpu):
    """Every card makes them still, and no program asks for them."""

    def old_channel(state):
        try:
            return state["p"].alloc(state["p"].device, 0x906F, bytes(368))
        except nv.RmError as error:
            return error.status

    assert web.processes[0].run(old_channel) == nv.BAD_CLASS
    assert list(qgpu.tsgs(web.id)) == []


@pytest.mark.parametrize("heap", [False, True])
def test_memory_at_a_place_of_ones_own_is_refused_under_a_limit(web, heap):
    """RM takes what the alignment spans besides."""
    (process,) = web.processes
    fixed = (0x10, MIB) if heap else (0x10, MIB, nv.MEM)

    assert process.run(of_the_heap if heap else as_object, *fixed) == NOT_SUPPORTED
    assert (web.held(), qg.used()) == (0, 0)


def test_what_maps_by_itself_is_refused(web):
    """MemoryMapper takes page tables that nobody can count."""

    def mapper(state):
        try:
            state["p"].alloc(state["p"].device, 0xFE, bytes(32))
        except nv.RmError as error:
            return error.status
        return 0

    assert web.processes[0].run(mapper) == nv.BAD_CLASS


def device(state):
    """A device in a client of its own, because a client may have few."""
    p = state["p"]
    own, p.client = p.client, p.alloc(0, nv.ROOT, handle=0)
    try:
        return p.alloc(p.client, nv.DEVICE, bytes(56))
    except nv.RmError as error:
        return -error.status
    finally:
        p.client = own


def space(state):
    p = state["p"]
    try:
        return p.alloc(p.device, nv.VASPACE)
    except nv.RmError as error:
        return -error.status


def test_address_spaces_are_charged_and_refused_at_the_limit(web):
    """Each has its first page tables on the card."""
    (process,) = web.processes
    web.grant(memory=6 * qg.SPACE)
    answers = [process.run(space) for _ in range(7)]

    assert [answer > 0 for answer in answers] == 5 * [True] + 2 * [False]
    assert answers[-1] == -nv.NO_MEMORY
    assert qg.used() == web.held() == 5 * qg.SPACE
    process.run(lambda state, handle: state["p"].free(handle), answers[0])
    assert qg.used() == web.held() == 4 * qg.SPACE


def test_devices_are_charged_and_refused_at_the_limit(web):
    """Each comes with an address space; but a program must be able to look at the card in a full pod too."""
    (process,) = web.processes
    web.grant(memory=qg.SPACE)
    answers = [process.run(device) for _ in range(18)]

    assert [answer > 0 for answer in answers] == 15 * [True] + 3 * [False]
    assert answers[-1] == -nv.NO_MEMORY
    assert web.usage().memory == 16 * qg.SPACE
    assert process.run(take, 1) == -nv.NO_MEMORY


def spaces_before_a_subdevice(state, count):
    """So many address spaces below a device that has no subdevice yet; how many RM made."""
    p = state["p"]
    device = p.alloc(p.client, nv.DEVICE, bytes(56))
    made = 0
    for _ in range(count):
        try:
            p.alloc(device, nv.VASPACE, bytes(64))
            made += 1
        except nv.RmError:
            break
    return made


def test_address_spaces_of_an_unknown_card_are_charged(web):
    """The module learns a device's card by its first subdevice; the pod decides when it makes one."""
    (process,) = web.processes
    before = web.held()

    assert process.run(spaces_before_a_subdevice, 100) == 100
    assert web.held() - before >= 100 * qg.SPACE


def test_address_spaces_of_an_unknown_card_count_to_the_limit(web):
    (process,) = web.processes

    assert process.run(spaces_before_a_subdevice, 1 << 12) < 1 << 12  # 64 MiB are 1,024 of them
