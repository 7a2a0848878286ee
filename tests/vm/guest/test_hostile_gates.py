"""Pods that mean harm: none opens its own gate, keeps it open, or keeps us from closing it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import threading
from pathlib import Path

import faults
import nv
import pytest
import qg
from programs import MIB, status_of, take

INVALID_STATE, NOT_FOUND, DUPLICATE = 0x40, 0x57, 0x19


def test_a_channel_is_not_duplicated(web):
    def duplicate(state):
        p = state["p"]
        _, (channel,) = p.compute()
        try:
            p.dup(p.client, channel)
        except nv.RmError as error:
            return error.status
        return 0

    before = qg.sim()["objects"]

    assert web.processes[0].run(duplicate) == 0x56
    assert qg.sim()["objects"] == before + 2


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


def test_without_a_subdevice_there_is_nothing_to_gate(web):
    def bare(state):
        p = state["p"]
        p.free(p.subdevice)
        said = []
        for make in (p.tsg, lambda: p.channel(p.device)):
            try:
                said.append(make())
            except nv.RmError as error:
                said.append(error.status)
        return said

    assert web.processes[0].run(bare) == [INVALID_STATE, INVALID_STATE]


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


def waiting(state, nr, call):
    """Issue a call. While the driver has it another thread takes its page away, and nobody answers the fault."""
    p, libc = state["p"], ctypes.CDLL(None, use_errno=True)
    uffd = libc.syscall(323, os.O_CLOEXEC)
    page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    page[: len(call)] = call
    other = threading.Thread(target=libc.ioctl, args=(p.ctl, nv.word(nr, len(call)), ctypes.c_void_p(at)))
    fcntl.ioctl(uffd, 0xC018AA3F, struct.pack("QQQ", 0xAA, 0, 0))
    fcntl.ioctl(uffd, 0xC020AA00, struct.pack("QQQQ", at, 4096, 1, 0))
    other.daemon = True
    other.start()
    threading.Event().wait(0.2)
    libc.madvise(ctypes.c_void_p(at), 4096, 4)
    state["uffd"], state["page"] = uffd, page


@pytest.mark.parametrize(("how", "off"), [("start", 1), ("free", 1), ("make", 2)])
def test_a_gate_waits_for_no_page_of_the_pods(web, qgpu, linger, how, off):
    def flood(state):
        p = state["p"]
        state["tsg"], (channel,) = p.compute()
        p.submit(channel, 100)
        state["space"] = p.alloc(p.device, nv.VASPACE)

    def pull(state, how):
        p, state["params"] = state["p"], ctypes.create_string_buffer(368)
        at = ctypes.addressof(state["params"])
        if how == "start":
            waiting(state, 0x2A, nv._CONTROL.pack(p.client, state["tsg"], 0xA06C0101, 0, at, 2, 0xFFFF))
        elif how == "free":
            waiting(state, 0x29, struct.pack("IIII", p.client, 0, state["space"], 0xFFFF))
        else:
            waiting(state, 0x2B, nv._ALLOC.pack(p.client, state["tsg"], 0x5CFFFF00, nv.CHANNEL, at, 0, 0, 0, 0xFFFF, 0))

    (process,) = web.processes
    process.run(flood)
    qgpu.plan((web.id, 5000, []))
    linger(500000)
    process.run(pull, how)
    linger(0)
    threading.Event().wait(0.5)

    assert qg.until(lambda: [tsg["off"] for tsg in qg.sim_tsgs()] == [off], 5)


CILP = 2


@pytest.mark.parametrize("mode", [0, 1], ids=["wait for idle", "thread blocks"])
def test_a_pod_does_not_make_its_kernels_last(web, mode):
    """Nothing takes the engine from a kernel that cannot be preempted."""

    def ask(state, mode):
        p = state["p"]
        state["tsg"], _ = p.compute()
        try:
            p.control(p.subdevice, 0x20801210, struct.pack("IIIIIIQ", 1, state["tsg"], 0, mode, 0, 0, 0))
        except nv.RmError as error:
            return error.status
        return 0

    assert web.processes[0].run(ask, mode) == nv.NO_PERMISSION
    assert web.processes[0].run(ask, CILP) == 0


@pytest.mark.parametrize("limit", [{"memory": 64 * MIB}, {}], ids=["a limit", "no limit"])
def test_graphics_are_not_preempted_in_a_draw_under_a_limit(pod, limit):
    """RM gives the context buffers for it, which nobody counts; waiting for idle takes none."""

    def ask(state, mode):
        p = state["p"] = nv.Program()
        tsg, _ = p.compute()
        params = struct.pack("IIIIIIQ", 2, tsg, mode, 0, 0, 0, 0)
        return status_of(state, "control", p.subdevice, 0x20801210, params)

    process = pod("web", **limit).process()

    assert process.run(ask, 1) == (nv.NO_PERMISSION if limit else 0)
    assert process.run(ask, 0) == 0


def test_compute_can_be_preempted_though_nobody_asks(web):
    def compute(state):
        p = state["p"]
        p.alloc(p.channel(p.tsg()), 0xCBC0)

    web.processes[0].run(compute)

    assert [tsg["mode"] for tsg in qg.sim_tsgs()] == [CILP]


@pytest.fixture
def failing():
    yield lambda call, status: faults.inject([faults.Fault(call, status)])
    faults.cleared()


def channel(state):
    state["channel"] = state["p"].channel(state["p"].tsg())


def compute(state):
    return status_of(state, "alloc", state["channel"], 0xCBC0)


def compute_that_rm_denies(state):
    """RM makes the object, cannot write its parameters back, and says that it failed."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), mmap.PAGESIZE, mmap.PROT_READ) == 0
    data = bytearray(nv._ALLOC.pack(state["p"].client, state["channel"], 0x5CFFFF00, 0xCBC0, at, 0, 0, 0, 0xFFFF, 0))
    nv.call(state["p"].ctl, 0x2B, data)
    return nv._ALLOC.unpack(data)[8]


@pytest.mark.parametrize(
    ("call", "status"), [("preemption", 0x57), ("preemption", nv.NO_MEMORY), ("subdevice", nv.NOT_SUPPORTED)]
)
def test_compute_that_rm_does_not_make_preemptible_is_freed(web, failing, call, status):
    (process,) = web.processes
    process.run(channel)
    before = qg.sim()["objects"]
    failing(call, status)

    assert (process.run(compute), qg.sim()["objects"]) == (INVALID_STATE, before)
    assert (process.run(compute_that_rm_denies), qg.sim()["objects"]) == (INVALID_STATE, before)
    faults.cleared()
    assert (process.run(compute), [tsg["mode"] for tsg in qg.sim_tsgs()]) == (0, [CILP])


def test_compute_whose_maker_waits_for_a_page_is_preemptible(web, linger):
    def make(state):
        p = state["p"]
        waiting(state, 0x2B, nv._ALLOC.pack(p.client, state["channel"], 0x5CFFFF00, 0xCBC0, 0, 0, 0, 0, 0xFFFF, 0))

    (process,) = web.processes
    process.run(channel)
    linger(500000)
    process.run(make)
    linger(0)

    assert qg.until(lambda: [tsg["mode"] for tsg in qg.sim_tsgs()] == [CILP], 5)


def made_by_rm(state):
    """A channel with a kernel, and the handle of the graphics context that RM made for it: its last one but one."""
    p = state["p"]
    _, (channel,) = p.compute()
    p.submit(channel, 1000)
    return p.alloc(p.subdevice, 0x2081, handle=0) - 1


def test_what_rm_made_for_a_channel_is_not_freed(web, qgpu, parameter):
    """Nor by an allocation that fails and names it; RM would wait for the channel's work behind its closed gate."""

    def reuse(state, handle):
        p = state["p"]
        data = bytearray(nv._ALLOC.pack(p.client, p.device, handle, nv.MEM, 8, 0, 0, 0, 0xFFFF, 0))
        nv.call(p.ctl, 0x2B, data)
        return nv._ALLOC.unpack(data)[8]

    parameter("contexts", "Y")
    (process,) = web.processes
    handle = process.run(made_by_rm)
    qgpu.plan((web.id, 5000, []))
    before = qg.sim()

    assert process.run(lambda state, handle: state["p"].free(handle), handle) == NOT_FOUND
    assert process.run(reuse, handle) == DUPLICATE
    after = qg.sim()
    assert [after[name] for name in ("objects", "waits")] == [before[name] for name in ("objects", "waits")]
    assert [tsg["off"] for tsg in qg.sim_tsgs()] == [1]


def test_compute_stays_on_a_card_that_cannot_preempt_it(web, failing):
    (process,) = web.processes
    process.run(channel)
    failing("preemption", nv.NOT_SUPPORTED)

    assert (process.run(compute), web.info().refused_allocs) == (0, 0)


def test_a_mode_exchanged_after_the_check_gains_nothing(web, linger):
    def race(state):
        p = state["p"]
        tsg, _ = p.compute()
        params = ctypes.create_string_buffer(struct.pack("IIIIIIQ", 1, tsg, 0, 2, 0, 0, 0), 32)
        data = bytearray(nv._CONTROL.pack(p.client, p.subdevice, 0x20801210, 0, ctypes.addressof(params), 32, 0xFFFF))
        late = threading.Timer(0.05, lambda: struct.pack_into("I", params, 12, 0))
        late.start()
        nv.call(p.ctl, 0x2A, data)
        late.join()
        return nv._CONTROL.unpack(data)[6]

    linger(300000)

    assert web.processes[0].run(race) == 0
    assert [tsg["mode"] for tsg in qg.sim_tsgs()] == [CILP]
