"""The real resource manager, without a GPU, through the interposer: its answers are its own."""

from __future__ import annotations

import ctypes
import os
import struct

import modules
import nv
import pytest
import qg

CONFIDENTIAL_COMPUTE = 0xCB33


def alloc(fd, client, parent, handle, cls, params=b""):
    block = ctypes.create_string_buffer(params, max(1, len(params)))
    at = ctypes.addressof(block) if params else 0
    data = bytearray(struct.pack("IIIIQQIIII", client, parent, handle, cls, at, 0, len(params), 0, 0xFFFF, 0))
    nv.call(fd, 0x2B, data)
    fields = struct.unpack("IIIIQQIIII", data)
    return fields[2], fields[8]


def control(fd, client, cmd, size):
    block = ctypes.create_string_buffer(size)
    data = bytearray(struct.pack("IIIIQII", client, client, cmd, 0, ctypes.addressof(block), size, 0xFFFF))
    nv.call(fd, 0x2A, data)
    return struct.unpack("IIIIQII", data)[6], bytes(block.raw)


def free(fd, client, handle):
    data = bytearray(struct.pack("IIII", client, client, handle, 0xFFFF))
    nv.call(fd, 0x29, data)
    return struct.unpack("IIII", data)[3]


def talk(_state):
    """What RM says to a client without a GPU, as far as it does not change from call to call."""
    fd = os.open(nv.CTL, os.O_RDWR)
    version = bytearray(struct.pack("II64s", ord("2"), 0, b""))
    nv.call(fd, 210, version)
    client, status = alloc(fd, 0, 0, 0, nv.ROOT)
    said = [status, version[8:72].rstrip(b"\0")]
    said += [control(fd, client, cmd, size) for cmd, size in ((0x201, 128), (0x214, 128), (0x12345, 8), (0x201, 127))]
    said.append(alloc(fd, client, client, 0x5C000001, nv.DEVICE, bytes(56))[1])
    said.append(alloc(fd, client, client, 0x5C000002, 0xFFFF)[1])
    said.append(alloc(fd, client, client, 0x5C000003, CONFIDENTIAL_COMPUTE, bytes(4))[1])
    said.append(alloc(fd, 0xC1D0FFFF, 0xC1D0FFFF, 0x5C000004, nv.DEVICE, bytes(56))[1])
    for nr, size in ((0x77, 8), (0x2B, 4)):
        try:
            nv.call(fd, nr, bytearray(size))
        except OSError as error:
            said.append(error.errno)
    said += [free(fd, client, 0x5C000003), free(fd, client, client), free(fd, client, client)]
    os.close(fd)
    return said


def test_module_knows_this_driver(qgpu):
    info = qgpu.info()

    assert (info.state, qg.uapi.ffi.string(info.driver).decode()) == (1, modules.VERSION)


def test_calls_are_sealed(qgpu):
    assert modules.flags(qgpu, "SEALED", "MANAGED") == {"SEALED"}


def test_the_made_up_card_is_listed(qgpu):
    assert qgpu.info().nr_gpus == 1


def test_rm_says_the_same_to_a_pod_as_without_the_module():
    """Twice each, so that what RM answers differently by itself would show."""
    plain = talk({}), talk({})
    modules.load()
    device = qg.Qgpu()
    web = qg.Pod(device, "web")
    process = web.process()
    inside = process.run(talk), process.run(talk)
    outside = talk({})
    web.close()
    device.close()
    modules.unload()

    assert plain[0] == plain[1] == inside[0] == inside[1] == outside
    assert modules.VERSION.encode() == plain[0][1]


def test_clients_are_registered_confirmed_by_rm_and_forgotten(web, qgpu):
    def some(state):
        state["fd"] = os.open(nv.CTL, os.O_RDWR)
        state["clients"] = [alloc(state["fd"], 0, 0, 0, nv.ROOT)[0] for _ in range(3)]

    process = web.process()
    process.run(some)
    assert web.info().nr_clients == 3
    process.run(lambda state: free(state["fd"], state["clients"][0], state["clients"][0]))
    assert web.info().nr_clients == 2
    process.run(lambda state: os.close(state["fd"]))

    assert web.info().nr_clients == 0


def test_scheduling_controls_are_refused_before_rm_sees_them(web):
    def ask(_state):
        fd = os.open(nv.CTL, os.O_RDWR)
        client, _ = alloc(fd, 0, 0, 0, nv.ROOT)
        answers = [control(fd, client, cmd, size)[0] for cmd, size in ((0x2080110B, 536), (0xA06C0110, 1))]
        os.close(fd)
        return answers

    assert web.process().run(ask) == [nv.NO_PERMISSION] * 2
    assert web.info().refused_controls == 2


def test_a_killed_process_leaves_nothing(web, qgpu):
    def hold(_state):
        fd = os.open(nv.CTL, os.O_RDWR)
        return alloc(fd, 0, 0, 0, nv.ROOT)[1]

    process = web.process()
    assert process.run(hold) == 0
    process.kill()
    qg.until(lambda: web.info().nr_clients == 0)


def test_driver_may_not_leave_under_the_module_and_may_after_it(qgpu):
    with pytest.raises(BlockingIOError):
        qg.rmmod("nvidia")

    assert qgpu.info().state == 1


def test_module_may_come_before_the_driver():
    qg.rmmod("nvidia")
    qg.insmod("qgpu.ko", f"accept_driver={modules.VERSION}")
    device = qg.Qgpu()
    assert device.info().state != 1
    qg.insmod("nvidia.ko")
    qg.nodes()
    if modules.PLAIN:
        qg.insmod("qgpu_rm.ko")
    qg.until(lambda: device.info().state == 1)
    device.close()
    modules.unload()
