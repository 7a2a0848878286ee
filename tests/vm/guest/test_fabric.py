"""An object of the NVLink fabric keeps memory as another handle of it does: for as long as it lives, and no longer."""

from __future__ import annotations

import ctypes
import mmap
import struct
import threading

import nv
import pytest
import qg
from programs import MIB, ROOM, duplicate, free, program, take
from test_untracked_objects import quick

FABRIC, MULTICAST = 0xF8, 0xFD
PIECES = 1 << 15


def put_on_fabric(state, memory, handle=None):
    """Put memory on the fabric, as libcuda does with all that it allocates where cards are linked; the new handle."""
    try:
        return state["p"].alloc(state["p"].device, FABRIC, struct.pack("40xI20x", memory), handle)
    except nv.RmError as error:
        return -error.status


def client_of(state):
    return state["p"].client


@pytest.fixture
def linked(web):
    """A process of a pod, its memory and the object that keeps it."""
    (process,) = web.processes
    memory = process.run(take, 32 * MIB)
    return process, memory, process.run(put_on_fabric, memory)


@pytest.mark.parametrize("last", [1, 2], ids=["memory", "fabric"])
def test_memory_is_discharged_once_both_are_freed(web, linked, last):
    process = linked[0]
    process.run(free, linked[3 - last])
    assert web.held() == qg.used() == 32 * MIB
    process.run(free, linked[last])

    assert web.held() == qg.used() == 0


def test_what_is_above_takes_both_along(web, linked):
    process = linked[0]
    process.run(lambda state: state["p"].free(state["p"].device))

    assert (web.held(), qg.used()) == (-qg.SPACE, 0)  # the device's own charge has gone too


def test_memory_can_be_taken_again_and_again(web, linked):
    """A checkpoint frees all and takes it again; so does a framework that returns its cache."""
    process, memory, fabric = linked
    for _ in range(4):
        process.run(free, fabric)
        process.run(free, memory)
        memory = process.run(take, 48 * MIB)
        assert memory > 0
        fabric = process.run(put_on_fabric, memory)

    assert web.held() == qg.used() == 48 * MIB


def test_a_copy_on_the_fabric_keeps_memory_charged_too(web, linked):
    process, memory, fabric = linked
    other = web.process()
    other.run(program)
    copy = other.run(duplicate, process.run(client_of), fabric)
    again = other.run(duplicate, other.run(client_of), copy)
    for handle in (memory, fabric):
        process.run(free, handle)
    other.run(free, copy)
    assert web.held() == qg.used() == 32 * MIB
    other.run(free, again)

    assert web.held() == qg.used() == 0


def test_an_object_on_the_fabric_of_another_is_its_memory(web, linked):
    process, memory, fabric = linked
    second = process.run(put_on_fabric, fabric)
    for handle in (memory, fabric):
        process.run(free, handle)
    assert web.held() == qg.used() == 32 * MIB
    process.run(free, second)

    assert web.held() == qg.used() == 0


def test_another_pod_gets_no_copy(linked, pod):
    process, _memory, fabric = linked
    other = pod("other", memory=48 * MIB + ROOM)
    second = other.process()
    second.run(program)
    before = qg.sim()["objects"]

    assert second.run(duplicate, process.run(client_of), fabric) == -nv.NO_PERMISSION
    assert (other.held(), qg.sim()["objects"]) == (0, before)


def test_an_object_is_not_exchanged_during_its_copy(web, linked, linger):
    """The copy waits in the driver, and the call that would free the object waits for that."""
    process, memory, fabric = linked
    other = web.process()
    other.run(program)
    client = process.run(client_of)
    linger(1500000)
    other.start(duplicate, client, fabric)
    threading.Event().wait(0.1)
    linger(0)
    process.run(free, fabric)
    process.run(put_on_fabric, memory, fabric)

    copy = other.result()
    process.run(free, fabric)
    process.run(free, memory)
    assert web.held() == qg.used() == 32 * MIB
    other.run(free, copy)
    assert web.held() == qg.used() == 0


def test_memory_exported_from_the_fabric_stays_charged(web, linked):
    process, memory, fabric = linked
    process.run(lambda state, handle: state.update(fd=state["p"].export(handle)), fabric)
    for handle in (memory, fabric):
        process.run(free, handle)
    assert web.held() == qg.used() == 32 * MIB
    process.stop()

    assert web.held() == qg.used() == 0


def test_memory_exported_by_all_its_names_comes_back_once(web, linked):
    """The export from the fabric must not hide the memory's own name, by which an import is recognised."""
    process, memory, fabric = linked
    fd = process.run(lambda state, handle: state["p"].export(handle), memory)
    process.run(lambda state, handle: state.update(fd=state["p"].export(handle)), fabric)

    def import_own(state, fd):
        return state["p"].import_(fd)

    assert process.run(import_own, fd) > 0
    assert web.held() == 32 * MIB


def test_no_object_gets_its_memory_later(web):
    """RM attaches any number of pieces of memory to such an object, and detaches all with its lock held."""
    (process,) = web.processes
    before = qg.sim()["objects"]

    assert process.run(put_on_fabric, 0) == -nv.NOT_SUPPORTED
    assert (qg.sim()["objects"], web.info().refused_allocs) == (before, 1)


def test_what_rm_made_and_could_not_say_is_freed(web):
    """RM cannot write the parameters back, reports a failure and keeps the object."""
    (process,) = web.processes
    memory = process.run(take, 32 * MIB)
    before = qg.sim()["objects"]

    def read_only(state, memory):
        p = state["p"]
        page = mmap.mmap(-1, mmap.PAGESIZE)
        page[40:44] = struct.pack("I", memory)
        at = ctypes.addressof(ctypes.c_char.from_buffer(page))
        assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(at), mmap.PAGESIZE, mmap.PROT_READ) == 0
        data = bytearray(nv._ALLOC.pack(p.client, p.device, 0x5C00F8F8, FABRIC, at, 0, 0, 0, 0xFFFF, 0))
        nv.call(p.ctl, 0x2B, data)
        return nv._ALLOC.unpack(data)[8]

    assert process.run(read_only, memory) != 0
    assert qg.sim()["objects"] == before
    process.run(free, memory)
    assert web.held() == qg.used() == 0


def attach(state, number):
    """Attach memory to a multicast object again and again; how often that goes well, and RM's last status."""
    p = state["p"]
    state["multicast"] = state.get("multicast") or p.alloc(p.client, MULTICAST)
    params = struct.pack("II32x", p.subdevice, p.memory(MIB))
    for made in range(number):
        try:
            p.control(state["multicast"], 0xFD0102, params)
        except nv.RmError as error:
            return made, error.status
    return number, 0


@quick
def test_pieces_of_multicast_objects_are_bounded(web):
    """RM holds its lock while it detaches all of them."""
    (process,) = web.processes

    assert process.run(attach, PIECES + 1) == (PIECES, nv.NO_RESOURCES)
    process.run(lambda state: state["p"].control(state["multicast"], 0xFD0105, bytes(16)))
    assert process.run(attach, 2) == (1, nv.NO_RESOURCES)
    process.run(lambda state: state["p"].free(state.pop("multicast")))
    assert process.run(attach, 2) == (2, 0)
