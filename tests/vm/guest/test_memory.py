"""Memory: what is charged, what is refused, and that nobody is believed."""

from __future__ import annotations

import os
import signal
import struct
import threading
from pathlib import Path

import nv
import pytest
import qg
from programs import MIB, ROOM, program, take


def test_memory_beyond_limit_is_refused_with_rm_status(web):
    (process,) = web.processes
    answers = [process.run(take, 16 * MIB) for _ in range(5)]

    assert [answer > 0 for answer in answers] == [True, True, True, True, False]
    assert answers[4] == -nv.NO_MEMORY
    assert (web.held(), web.info().refused_allocs) == (64 * MIB, 1)


def test_the_whole_pod_shares_one_limit(web):
    other = web.process()
    other.run(program)
    web.processes[0].run(take, 48 * MIB)

    assert other.run(take, 32 * MIB) == -nv.NO_MEMORY
    assert other.run(take, 16 * MIB) > 0


def test_freed_memory_can_be_had_again(web):
    (process,) = web.processes
    for _ in range(3):
        handle = process.run(take, 64 * MIB)
        process.run(lambda state, handle: state["p"].free(handle), handle)

    assert handle > 0
    assert (web.held(), web.usage().peak_memory) == (0, 64 * MIB + qg.SPACE)


def test_memory_goes_with_its_device_and_its_client(web):
    (process,) = web.processes
    process.run(take, 16 * MIB)
    process.run(lambda state: state["p"].free(state["p"].device))

    assert web.usage().memory == 0
    process.run(lambda state: state["p"].free(state["p"].client))
    assert web.info().nr_clients == 0


def test_true_sizes_are_charged_not_asked_ones(web):
    web.processes[0].run(take, 1)

    assert web.held() == 64 << 10


def test_a_handle_chosen_by_rm_is_charged_too(web):
    assert web.processes[0].run(take, MIB, 0) > 0
    assert web.held() == MIB


def test_memory_in_one_half_of_a_card_needs_no_limit(web, pod):
    """RM sets 64 MiB aside for it (NVOS32_ATTR2_ENABLE_LOCALIZED_MEMORY), and tells only the size asked for."""
    free = pod("free").process()
    free.run(program)
    statuses = [[each.run(in_one_half, how) for how in ("alloc", "heap")] for each in (web.processes[0], free)]

    assert statuses == [[nv.NOT_SUPPORTED] * 2, [0] * 2]


def in_one_half(state, call):
    p, attributes2 = state["p"], 1 << 29
    if call == "heap":
        p.last += 1
        return struct.unpack_from("I", p.heap(2, w44=p.last, w52=1 << 14, w144=attributes2, u88=MIB), 20)[0]
    try:
        p.alloc(p.device, nv.MEM, struct.pack("28xI32xQ56x", attributes2, MIB))
    except nv.RmError as error:
        return error.status
    return 0


def test_a_limit_lowered_below_use_takes_nothing_away(web):
    web.processes[0].run(take, 32 * MIB)
    web.grant(memory=16 * MIB)

    assert web.processes[0].run(take, MIB) == -nv.NO_MEMORY
    assert web.held() == 32 * MIB


@pytest.fixture
def two_cards(_driver):
    """The module on a machine with two cards."""
    qg.rmmod("nvidia")
    with qg.driver("gpus=2"):
        qg.insmod("qgpu.ko")
        opened = qg.Qgpu()
        yield opened
        opened.close()
        qg.rmmod("qgpu")
    qg.insmod("nvidia.ko")


def test_each_card_has_its_own_limit(two_cards):
    limits = [32 * MIB, 64 * MIB]
    web = qg.Pod(two_cards, "web", memory=limits[0] + ROOM)
    web.grant(gpu=1, memory=limits[1] + ROOM)
    process = web.process()
    process.run(lambda state: state.update(cards=[nv.Program(0), nv.Program(1)]))
    most = [process.run(fill, card, 16 * MIB) for card in (0, 1)]
    twice = process.run(fill, 0, 16 * MIB)
    used = [web.usage(card).memory for card in (0, 1)]
    web.close()

    assert most == [(limit, nv.NO_MEMORY) for limit in limits]
    assert twice == (0, nv.NO_MEMORY)
    assert used == [limit + qg.SPACE for limit in limits]


def fill(state, card, size):
    """Take memory of one of two cards until it is refused; how much it was, and RM's status then."""
    taken = 0
    while True:
        try:
            state["cards"][card].memory(size)
        except nv.RmError as error:
            return taken, error.status
        taken += size


def test_no_limit_is_no_limit(pod):
    free = pod("free")
    process = free.process()
    process.run(program)

    assert process.run(take, 1 << 30) > 0
    assert free.held() == 1 << 30


def test_a_duplicate_keeps_memory_charged_once(web):
    (process,) = web.processes
    handle = process.run(take, 16 * MIB)
    process.run(lambda state, handle: state["p"].dup(state["p"].client, handle), handle)
    assert web.held() == 16 * MIB
    process.run(lambda state, handle: state["p"].free(handle), handle)

    assert web.held() == 16 * MIB


def test_memory_below_an_object_nobody_knows_is_refused(web):
    def below(state, parent):
        try:
            return state["p"].alloc(parent, nv.MEM, struct.pack("64xQ56x", MIB))
        except nv.RmError as error:
            return -error.status

    assert web.processes[0].run(below, 0x5CFFFFFF) == -0x36
    assert web.held() == 0


@pytest.mark.parametrize("what", ["device", "subdevice", "channel"])
def test_what_leads_to_channels_has_one_name(web, what):
    def second_name(state, what):
        p = state["p"]
        _, (channel,) = p.compute()
        handle = {"device": p.device, "subdevice": p.subdevice, "channel": channel}[what]
        try:
            return p.dup(p.client, handle)
        except nv.RmError as error:
            return -error.status

    assert web.processes[0].run(second_name, what) == -0x56


def test_heap_calls_are_limited_like_objects(web):
    (process,) = web.processes

    def heap(state, size, flags, attr):
        state["p"].last += 1
        data = state["p"].heap(2, w44=state["p"].last, w52=flags, w56=attr, u88=size)
        return struct.unpack_from("I", data, 20)[0]

    system = 1 << 25
    assert process.run(heap, 65 * MIB, 0, 0) == nv.NO_MEMORY
    assert process.run(heap, 16 * MIB, 0, 0) == 0
    assert process.run(heap, 1 << 30, 0x00080400, 0) == 0  # address space, whose tables come later
    assert process.run(heap, 1 << 30, 0, system) == 0
    assert web.held() == 16 * MIB
    handle = process.run(lambda state: state["p"].last - 2)
    process.run(lambda state, handle: state["p"].heap(3, w44=handle), handle)
    assert web.held() == 0


@pytest.mark.parametrize("function", [6, 14, 27])
def test_the_heap_makes_memory_in_one_way_only(web, function):
    """Each of the other functions has a size of its own: tiled memory (6) is as large as height times pitch."""
    (process,) = web.processes

    def ask(state, function):
        return struct.unpack_from("I", state["p"].heap(function, w44=0x5C0000FF, u80=4096, u88=4096), 20)[0]

    assert process.run(ask, function) == nv.NOT_SUPPORTED
    assert web.held() == 0


def test_the_card_looks_as_large_as_the_limit(web):
    (process,) = web.processes
    process.run(take, 16 * MIB)
    shown = process.run(lambda state: state["p"].fb_info(7, 8, 9, 0x16, 0x10))
    heap = process.run(lambda state: bytes(state["p"].heap(5)))

    limit, left = 64 * MIB + ROOM, 48 * MIB + ROOM - qg.SPACE
    assert shown == {7: limit >> 10, 8: limit >> 10, 9: limit >> 10, 0x16: left >> 10, 0x10: 0}
    assert struct.unpack_from("QQ", heap, 24) == (limit, left)


def test_others_see_the_whole_card(web):
    outside = nv.Program()
    try:
        assert outside.fb_info(8)[8] == 143771 << 10
    finally:
        outside.close()


def test_privileged_memory_classes_are_refused(web):
    def list_memory(state):
        statuses = []
        for cls in (0x82, 0x83, 0xC2):
            try:
                state["p"].alloc(state["p"].device, cls)
            except nv.RmError as error:
                statuses.append(error.status)
        return statuses

    assert web.processes[0].run(list_memory) == [nv.BAD_CLASS] * 3


def test_a_size_changed_after_the_check_gains_nothing(web, linger):
    """RM reads what a pointer points to after us; it acts on what was checked all the same."""

    def race(state):
        import ctypes

        p = state["p"]
        block = ctypes.create_string_buffer(struct.pack("64xQ56x", MIB), 128)
        late = threading.Timer(0.05, lambda: struct.pack_into("Q", block, 64, 1 << 30))
        p.last += 1
        data = bytearray(
            nv._ALLOC.pack(p.client, p.device, p.last, nv.MEM, ctypes.addressof(block), 0, 0, 0, 0xFFFF, 0)
        )
        late.start()
        nv.call(p.ctl, 0x2B, data)
        late.join()
        return nv._ALLOC.unpack(data)[8], struct.unpack_from("Q", block, 64)[0]

    linger(300000)

    assert web.processes[0].run(race) == (0, MIB)
    assert qg.used() == web.held() == web.usage().peak_memory - qg.SPACE == MIB
    assert web.info().flags & qg.uapi.NUMBERS["QGPU_POD_TAMPERED"]


def test_a_call_changed_between_check_and_use_gains_nothing(web):
    """Another process flips the class in the struct itself all the time: RM gets what was looked at."""

    def race(state):
        import ctypes
        import mmap

        p, libc = state["p"], ctypes.CDLL(None)
        block = ctypes.create_string_buffer(struct.pack("64xQ56x", 8 * MIB), 128)
        shared = mmap.mmap(-1, mmap.PAGESIZE)
        word = ctypes.c_uint32.from_buffer(shared, 12)
        flipper = os.fork()  # a thread would wait for the interpreter's lock
        while not flipper:
            word.value = nv.MEM
            word.value = 0x3E
        for _ in range(400):
            p.last += 1
            shared[:40] = nv._ALLOC.pack(p.client, p.device, p.last, 0x3E, ctypes.addressof(block), 0, 0, 0, 0, 0)[:40]
            libc.ioctl(p.ctl, nv.word(0x2B, 48), ctypes.byref(word, -12))
        os.kill(flipper, signal.SIGKILL)
        os.waitpid(flipper, 0)

    def raced():
        web.processes[0].run(race)
        return web.info().flags & qg.uapi.NUMBERS["QGPU_POD_TAMPERED"]

    qg.until(raced, 60)

    used = qg.used()
    assert used == web.held() <= 64 * MIB


def test_a_pod_has_no_more_in_the_register_than_it_may(web):
    """Beyond that RM's own answer would have no entry, so there is none."""
    entries_max = Path("/sys/module/qgpu/parameters/entries_max")
    was = entries_max.read_text()
    (process,) = web.processes
    entries_max.write_text("8")
    try:
        answers = [process.run(take, MIB) for _ in range(10)]
        process.run(lambda state, handle: state["p"].free(handle), answers[0])
        again = process.run(take, MIB)
    finally:
        entries_max.write_text(was)

    granted = [answer for answer in answers if answer > 0]
    assert 0 < len(granted) < 8
    assert set(answers) - set(granted) == {-nv.NO_MEMORY}
    assert again > 0
    assert web.held() == len(granted) * MIB
