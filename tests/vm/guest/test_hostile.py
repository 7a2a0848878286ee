"""Pods that mean harm: what RM allows and no program does must not cost the limit, the gate or the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
from pathlib import Path

import nv
import pytest
import qg

MIB = 1 << 20
INVALID_STATE = 0x40
LINGER = "/sys/module/nvidia/parameters/linger_us"


def program(state):
    state["p"] = nv.Program()


def take(state, size, handle=None):
    try:
        return state["p"].memory(size, handle)
    except nv.RmError as error:
        return -error.status


def status_of(state, function, *args):
    try:
        getattr(state["p"], function)(*args)
    except nv.RmError as error:
        return error.status
    return 0


@pytest.fixture
def web(pod):
    made = pod("web", memory=64 * MIB)
    made.process().run(program)
    return made


@pytest.fixture
def linger():
    """Set how long a call waits in the driver before it is looked at; back to nothing afterwards."""

    def set_us(value):
        with open(LINGER, "w") as file:
            file.write(str(value))

    yield set_us
    set_us(0)


def test_a_control_file_is_not_registered_with_another(web):
    def register(_state):
        first, second = os.open(nv.CTL, os.O_RDWR), os.open(nv.CTL, os.O_RDWR)
        card = os.open(nv.GPU.format(0), os.O_RDWR)
        nv.call(card, 201, bytearray(struct.pack("I", first)))
        try:
            nv.call(second, 201, bytearray(struct.pack("I", first)))
        except OSError as error:
            return error.errno
        return 0

    assert web.processes[0].run(register) == errno.EINVAL


@pytest.mark.parametrize("cls", [0x82, 0x83, 0xC2, nv.MEM])
def test_memory_by_address_is_refused_in_the_old_call_too(web, cls):
    """Class 0x40 in this call is all of the card's memory, where the caller is an administrator."""

    def allocate(state, cls):
        p = state["p"]
        nv.call(p.card, 201, bytearray(struct.pack("I", p.ctl)))
        p.last += 1
        data = bytearray(struct.pack("6IQQIIiI", p.client, p.device, p.last, cls, 0, 0, 0, 0, 0xFFFF, 0, -1, 0))
        nv.call(p.card, 0x27, data)
        return struct.unpack_from("I", data, 40)[0]

    before = qg.sim()["objects"]

    assert web.processes[0].run(allocate, cls) == nv.NO_PERMISSION
    assert qg.sim()["objects"] == before
    assert web.usage().memory == 0


def test_a_struct_that_cannot_be_written_back_saves_nothing(web):
    """The driver answers EFAULT, when RM has made the memory already."""

    def allocate(state, size):
        p = state["p"]
        block = ctypes.create_string_buffer(struct.pack("64xQ56x", size), 128)
        libc = ctypes.CDLL(None, use_errno=True)
        page = mmap.mmap(-1, 4096)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        codes = []
        for _ in range(8):
            p.last += 1
            at = ctypes.addressof(block)
            call = nv._ALLOC.pack(p.client, p.device, p.last, nv.MEM, at, 0, 0, 0, 0, 0)
            libc.mprotect(ctypes.c_void_p(address), 4096, 3)
            ctypes.memmove(address, call, len(call))
            libc.mprotect(ctypes.c_void_p(address), 4096, 1)
            libc.ioctl(p.ctl, nv.word(0x2B, 48), ctypes.c_void_p(address))
            codes.append(ctypes.get_errno())
        return codes

    assert errno.EFAULT in web.processes[0].run(allocate, 16 * MIB)
    used = qg.sim()["total"] - qg.sim()["free"]
    assert used == web.usage().memory <= 64 * MIB


def read_only(state, parent, cls, size, handle, params=b""):
    """Allocate with parameters in a page that RM cannot write back to; RM's status."""
    p = state["p"]
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.mmap(-1, 4096)
    page[: len(params) or size] = params or bytes(size)
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    libc.mprotect(ctypes.c_void_p(at), 4096, 1)
    data = bytearray(nv._ALLOC.pack(0 if cls == nv.ROOT else p.client, parent, handle, cls, at, 0, 0, 0, 0, 0))
    nv.call(p.ctl, 0x2B, data)
    libc.mprotect(ctypes.c_void_p(at), 4096, 3)
    return nv._ALLOC.unpack(data)[8], nv._ALLOC.unpack(data)[2]


def test_memory_that_rm_made_and_denies_is_not_had(web):
    def allocate(state, size):
        p = state["p"]
        return read_only(state, p.device, nv.MEM, 0, 0x5C00FF00, struct.pack("64xQ56x", size))[0]

    before = qg.sim()["objects"]

    assert web.processes[0].run(allocate, 16 * MIB) == 0x1E
    assert (qg.sim()["objects"], web.usage().memory) == (before, 0)
    assert qg.sim()["free"] == qg.sim()["total"]


def test_a_tsg_that_rm_made_and_denies_is_not_had(web):
    def allocate(state):
        return read_only(state, state["p"].device, nv.TSG, 20, 0x5C00FF00)[0]

    assert web.processes[0].run(allocate) == 0x1E
    assert qg.sim_tsgs() == []


def test_a_client_that_rm_made_and_denies_is_the_pods_all_the_same(web, qgpu):
    def allocate(state, size):
        p = state["p"]
        status, p.client = read_only(state, 0, nv.ROOT, 120, 0)
        p.device = p.alloc(p.client, nv.DEVICE, bytes(56))
        p.subdevice = p.alloc(p.device, nv.SUBDEVICE, bytes(4))
        return status, take(state, size)

    before = qgpu.info().nr_clients

    assert web.processes[0].run(allocate, 65 * MIB) == (0x1E, -nv.NO_MEMORY)
    assert (qgpu.info().nr_clients, web.usage().memory) == (before + 1, 0)


def test_a_handle_taken_twice_costs_the_first_nothing(web):
    (process,) = web.processes
    handle = process.run(take, 16 * MIB)

    assert process.run(take, 16 * MIB, handle) == -0x19
    assert qg.sim()["total"] - qg.sim()["free"] == web.usage().memory == 16 * MIB


@pytest.mark.parametrize("what", ["tsg", "channel"])
def test_a_tsg_or_channel_is_not_duplicated(web, what):
    def duplicate(state, what):
        p = state["p"]
        tsg, (channel,) = p.compute()
        try:
            p.dup(p.client, {"tsg": tsg, "channel": channel}[what])
        except nv.RmError as error:
            return error.status
        return 0

    before = qg.sim()["objects"]

    assert web.processes[0].run(duplicate, what) == 0x56
    assert qg.sim()["objects"] == before + 2


def test_a_device_of_no_known_card_gets_nothing(web):
    def bare(state):
        p = state["p"]
        p.free(p.device)
        p.device = p.alloc(p.client, nv.DEVICE, bytes(56))

    (process,) = web.processes
    process.run(bare)

    assert process.run(take, MIB) == -INVALID_STATE
    assert process.run(status_of, "tsg") == INVALID_STATE
    assert process.run(status_of, "channel", process.run(lambda state: state["p"].device)) == INVALID_STATE


def test_a_cards_number_overwritten_by_the_answer_gains_nothing(web):
    """The parameters lie over the member that RM answers the handle in: 0 before the call, not so after it."""

    def overlap(state):
        p = state["p"]
        p.free(p.device)
        data = ctypes.create_string_buffer(128)
        at = ctypes.addressof(data)
        data[:48] = nv._ALLOC.pack(p.client, p.client, 0, nv.DEVICE, at + 8, 0, 0, 0, 0xFFFF, 0)
        ctypes.CDLL(None).ioctl(p.ctl, nv.word(0x2B, 48), data)
        p.device = struct.unpack_from("I", data, 8)[0]
        p.subdevice = p.alloc(p.device, nv.SUBDEVICE, bytes(4))
        return struct.unpack_from("I", data, 40)[0]

    (process,) = web.processes

    assert process.run(overlap) == 0
    assert process.run(take, 1 << 30) == -nv.NO_MEMORY
    assert process.run(take, 16 * MIB) > 0
    assert web.usage().memory == 16 * MIB


def test_freeing_by_heap_call_frees_anything(web, qgpu):
    """VID_HEAP_CONTROL's free takes a TSG as well; its handle, used anew, is memory like any other."""

    def swap(state, size):
        p = state["p"]
        tsg, (channel,) = p.compute()
        p.heap(3, w44=tsg)
        return [p.memory(size, tsg), p.memory(size, channel)]

    before = qgpu.info().nr_objects
    web.processes[0].run(swap, 16 * MIB)

    assert web.usage().memory == 32 * MIB
    assert (qgpu.info().nr_objects, qgpu.tsgs(web.id)) == (before + 2, [])


def test_what_goes_with_an_address_space_is_forgotten(web, qgpu):
    def free(state):
        p = state["p"]
        space = p.alloc(p.device, nv.VASPACE)
        tsg = p.alloc(p.device, nv.TSG, struct.pack("8xII4x", space, 1))
        p.channel(tsg)
        p.free(space)

    before = qgpu.info().nr_objects
    web.processes[0].run(free)

    assert qg.sim_tsgs() == []
    assert (qgpu.info().nr_objects, qgpu.tsgs(web.id)) == (before, [])


def test_a_source_exchanged_while_it_is_duplicated_is_charged_as_what_it_became(web, linger):
    """The duplicate waits in the driver; meanwhile a larger piece of memory takes the source's handle."""
    first, second = web.processes[0], web.process()
    second.run(program)
    handle = first.run(take, MIB)
    client = first.run(lambda state: state["p"].client)
    linger(1500000)
    second.start(lambda state, client, handle: state["p"].dup(client, handle), client, handle)
    threading.Event().wait(0.1)
    linger(0)
    first.run(lambda state, handle: state["p"].free(handle), handle)
    first.run(take, 16 * MIB, handle)
    second.result()
    first.run(lambda state, handle: state["p"].free(handle), handle)

    assert qg.sim()["total"] - qg.sim()["free"] == web.usage().memory == 16 * MIB


def test_a_subdevice_stays_while_its_channels_do(web, qgpu):
    """The gate is a control on the pod's own subdevice: without one there would be no gate."""

    def flood(state):
        p = state["p"]
        state["tsg"], (channel,) = p.compute()
        p.submit(channel, 1000)
        return p.free(p.subdevice)

    (process,) = web.processes

    assert process.run(flood) == INVALID_STATE
    qgpu.plan((web.id, 5000, []))
    assert [tsg["off"] for tsg in qg.sim_tsgs()] == [1]
    process.run(lambda state: state["p"].free(state["tsg"]))
    assert process.run(lambda state: state["p"].free(state["p"].subdevice)) == 0


def test_a_gate_that_did_not_open_is_tried_again(web):
    def flood(state):
        p = state["p"]
        state["tsg"], (channel,) = p.compute()
        p.submit(channel, 1000)

    def off():
        return [tsg["off"] for tsg in qg.sim_tsgs()]

    web.processes[0].run(flood)
    planner = qg.Qgpu()
    planner.plan((web.id, 5000, []))
    assert off() == [1]
    with open("/sys/module/nvidia/parameters/gate_busy", "w") as file:
        file.write("6")
    planner.close()

    assert qg.until(lambda: off() == [0], 5)


def test_memory_is_not_exported_as_a_dma_buf_under_a_limit(web):
    def export(state):
        try:
            nv.call(state["p"].card, 217, bytearray(568))
        except OSError as error:
            return error.errno
        return 0

    assert web.processes[0].run(export) == errno.EOPNOTSUPP


@pytest.mark.parametrize("cmd", [0x3D05, 0x3D0B, 0xE00101, 0xFD0101])
def test_exported_memory_stays_charged_until_the_pod_has_no_file_left(web, cmd):
    """A descriptor keeps it, whichever that is: neither its handle's end nor its client's says anything."""
    (process,) = web.processes
    handle = process.run(take, 32 * MIB)
    with contextlib.suppress(nv.RmError):
        process.run(lambda state, cmd: state["p"].control(state["p"].client, cmd, bytes(120)), cmd)
    process.run(lambda state, handle: state["p"].free(handle), handle)
    process.run(lambda state: state["p"].free(state["p"].client))
    process.run(program)

    assert web.usage().memory == 32 * MIB
    assert process.run(take, 48 * MIB) == -nv.NO_MEMORY
    process.stop()
    assert web.usage().memory == 0


def test_the_state_is_told_while_a_call_holds_up_switching_off(web, qgpu, linger):
    (process,) = web.processes
    enforce = Path("/sys/module/qgpu/parameters/enforce")
    linger(3000000)
    process.start(take, MIB)
    threading.Event().wait(0.1)
    linger(0)
    switch = threading.Thread(target=enforce.write_text, args=("0",))
    switch.start()
    qg.until(lambda: qgpu.info().state == qg.uapi.NUMBERS["QGPU_STATE_OFF"])
    answered = process.pipe.poll()
    process.result()
    switch.join()
    enforce.write_text("1")

    assert not answered


def test_starting_channels_behind_a_closed_gate_gains_nothing(web, qgpu):
    """The card starts them; each start is paid back in time, and the gate is closed when it returns."""

    def flood(state):
        p = state["p"]
        state["tsg"], (state["channel"],) = p.compute()
        p.submit(state["channel"], 100)
        return p.query(state["channel"])["run_ns"]

    def loop(state):
        p = state["p"]
        before = p.query(state["channel"])
        for _ in range(20):
            p.control(state["tsg"], 0xA06C0101, bytes(2))
        after = p.query(state["channel"])
        return (after["run_ns"] - before["run_ns"]) / (after["now_ns"] - before["now_ns"])

    (process,) = web.processes
    process.run(flood)
    qgpu.plan((web.id, 5000, []))

    assert process.run(loop) < 0.25


def test_many_threads_gain_no_more_than_one_by_starting_channels(web, qgpu):
    """What the pod owes for a gate that was open is paid before the next is, whoever opens it."""

    def flood(state):
        p = state["p"]
        state["tsg"], (state["channel"],) = p.compute()
        p.submit(state["channel"], 100)

    def loop(state):
        p, before = state["p"], state["p"].query(state["channel"])

        def start():
            for _ in range(3):
                p.control(state["tsg"], 0xA06C0101, bytes(2))

        threads = [threading.Thread(target=start) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = p.query(state["channel"])
        return (after["run_ns"] - before["run_ns"]) / (after["now_ns"] - before["now_ns"])

    (process,) = web.processes
    process.run(flood)
    qgpu.plan((web.id, 5000, []))

    assert process.run(loop) < 0.25


@pytest.mark.parametrize("how", ["start", "free"])
def test_a_gate_waits_for_no_page_of_the_pods(web, qgpu, linger, how):
    """While the driver has the call another thread takes the page of its struct away, and nobody answers the fault."""

    def flood(state):
        p = state["p"]
        state["tsg"], (channel,) = p.compute()
        p.submit(channel, 100)
        state["space"] = p.alloc(p.device, nv.VASPACE)

    def pull(state, how):
        p, libc = state["p"], ctypes.CDLL(None, use_errno=True)
        uffd = libc.syscall(323, os.O_CLOEXEC)
        page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        at = ctypes.addressof(ctypes.c_char.from_buffer(page))
        params = ctypes.create_string_buffer(2)
        if how == "start":
            call = nv._CONTROL.pack(p.client, state["tsg"], 0xA06C0101, 0, ctypes.addressof(params), 2, 0xFFFF)
        else:
            call = struct.pack("IIII", p.client, 0, state["space"], 0xFFFF)
        page[: len(call)] = call
        nr = 0x2A if how == "start" else 0x29
        other = threading.Thread(target=libc.ioctl, args=(p.ctl, nv.word(nr, len(call)), ctypes.c_void_p(at)))
        fcntl.ioctl(uffd, 0xC018AA3F, struct.pack("QQQ", 0xAA, 0, 0))
        fcntl.ioctl(uffd, 0xC020AA00, struct.pack("QQQQ", at, 4096, 1, 0))
        other.daemon = True
        other.start()
        threading.Event().wait(0.2)
        libc.madvise(ctypes.c_void_p(at), 4096, 4)
        state["uffd"], state["page"], state["params"] = uffd, page, params

    (process,) = web.processes
    process.run(flood)
    qgpu.plan((web.id, 5000, []))
    linger(500000)
    process.run(pull, how)
    linger(0)
    threading.Event().wait(0.5)

    assert qg.until(lambda: [tsg["off"] for tsg in qg.sim_tsgs()] == [1], 5)


def test_an_object_with_parent_0_goes_with_its_client(web, qgpu):
    """RM reads parent 0 as the client. Last, for what is left behind by a module that does not is used after it."""

    def orphan(state):
        p = state["p"]
        p.device = p.alloc(0, nv.DEVICE, bytes(56))
        p.subdevice = p.alloc(p.device, nv.SUBDEVICE, bytes(4))
        p.compute()
        p.memory(MIB)

    process = web.process()
    process.run(program)
    process.run(orphan)
    assert web.usage().memory == MIB
    process.stop()

    assert (web.usage().memory, qgpu.tsgs(web.id)) == (0, [])
