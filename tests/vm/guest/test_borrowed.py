"""What is somebody else's: clients, files and process numbers of others give a pod no part in it and no way out."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from pathlib import Path

import nv
import pytest
import qg
from programs import MIB, ROOM, duplicate, lasting, program, succeed, take

TAKEN, NOT_WRITTEN = 0x19, 0x1E
AT_ONCE = Path("/sys/module/nvidia/parameters/at_once")


def make_client(state, root, handle, at=0, file="ctl", rights=0):
    """A client under a handle that the process chooses; RM's status, and the handle it says."""
    data = bytearray(nv._ALLOC.pack(root, 0, handle, nv.ROOT, at, rights, 0, 0, 0xFFFF, 0))
    try:
        nv.call(getattr(state["p"], file), 0x2B, data)
    except OSError as error:
        return error.errno, 0
    return nv._ALLOC.unpack(data)[8], nv._ALLOC.unpack(data)[2]


def make_in(state, client, parent, handle, cls):
    """An object in any client; RM's status."""
    block = ctypes.create_string_buffer(struct.pack("64xQ56x", MIB), 128)
    data = bytearray(nv._ALLOC.pack(client, parent, handle, cls, ctypes.addressof(block), 0, 0, 0, 0xFFFF, 0))
    nv.call(state["p"].ctl, 0x2B, data)
    return nv._ALLOC.unpack(data)[8]


def free_os_event(state, client):
    data = bytearray(struct.pack("IIII", client, 0, 7, 0xFFFF))
    nv.call(state["p"].ctl, 207, data)
    return struct.unpack("IIII", data)[3]


@pytest.mark.parametrize("file", ["ctl", "card"])
@pytest.mark.parametrize("how", ["taken", "unreadable"])
def test_a_client_that_rm_did_not_make_is_not_claimed(web, outside, file, how):
    """The module leaves the client and its objects to the process outside of pods that made them."""
    victim, (process,) = outside["p"], web.processes
    memory = victim.memory(16 * MIB)
    before = qg.sim()["objects"], qg.used()
    root, params = (victim.client, 0) if how == "taken" else (0, 1)

    assert process.run(make_client, root, victim.client, params, file)[0] != 0
    assert web.info().nr_clients == 1
    assert process.run(make_in, victim.client, victim.device, memory, nv.MEM) == nv.BAD_CLIENT
    assert process.run(make_in, victim.client, victim.client, victim.device, nv.DEVICE) == nv.BAD_CLIENT
    assert process.run(free_os_event, victim.client) == nv.BAD_CLIENT
    assert (qg.sim()["objects"], qg.used()) == before


def test_a_client_that_rm_dropped_again_is_not_claimed(web, outside, parameter):
    """RM names it before it refuses its rights. When the call comes back, a process outside has the handle."""
    (process,) = web.processes
    parameter("late_us", 1_000_000)
    parameter("at_once", 0)
    process.start(make_client, 0xC1D0ABCD, 0, 0, "ctl", 1)
    qg.until(lambda: int(AT_ONCE.read_text()))
    parameter("next_client", 0xC1D0ABCD)
    second = outside["p"].alloc(0, nv.ROOT, handle=0)
    said = process.result()

    assert (said, second) == ((nv.NO_PERMISSION, 0xC1D0ABCD), 0xC1D0ABCD)
    assert web.info().nr_clients == 1


def test_a_client_under_a_handle_that_is_free_is_a_pods(web):
    (process,) = web.processes

    assert process.run(make_client, 0xC1D0F00D, 0) == (0, 0xC1D0F00D)
    assert process.run(make_client, 0xC1D0F00D, 0xC1D0F00D)[0] == TAKEN
    assert web.info().nr_clients == 2


@pytest.mark.parametrize(("root", "handle"), [(0, 0), (0, 0xC1D0ABCD), (0xC1D0ABCD, 0), (0xC1D0ABCD, 0xC1D0ABCD)])
def test_a_client_that_rm_made_and_denies_is_a_pods(web, parameter, root, handle):
    """RM cannot write the parameters back, and keeps the client. A pod that foresees its handle hides nothing."""

    def denied(state, root, handle):
        page = mmap.mmap(-1, mmap.PAGESIZE)
        at = ctypes.addressof(ctypes.c_char.from_buffer(page))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), mmap.PAGESIZE, mmap.PROT_READ) == 0
        return make_client(state, root, handle, at)

    parameter("next_client", 0 if root else 0xC1D0ABCD)

    assert web.processes[0].run(denied, root, handle) == (NOT_WRITTEN, 0xC1D0ABCD)
    assert web.info().nr_clients == 2


def opened(state):
    state["ctl"], state["card"] = os.open(nv.CTL, os.O_RDWR), os.open(nv.GPU.format(0), os.O_RDWR)
    return os.getpid(), state["ctl"], state["card"]


def take_files(state, pid, *files):
    state["files"] = [qg.take_descriptor(pid, fd) for fd in files]


def errno_of(function, *args):
    try:
        function(*args)
    except OSError as error:
        return error.errno
    return 0


def use(state):
    """Make a client by each file, and map it; what comes of that."""
    calls = [errno_of(nv.call, fd, 0x2B, bytearray(48)) for fd in state["files"]]
    return calls + [errno_of(mmap.mmap, fd, mmap.PAGESIZE) for fd in state["files"]]


def test_files_of_an_ended_pod_are_of_no_use_to_another(qgpu, pod):
    """Nobody would be charged for what it made, and no gate would close."""
    ended, other = pod("ended"), pod("other", memory=64 * MIB + ROOM)
    first, second = ended.process(), other.process()
    second.run(take_files, *first.run(opened))
    assert errno.EPERM not in second.run(use)  # the first pod's, while there is one
    first.kill()
    qgpu.ioctl("POD_REMOVE", pod=ended.id)

    assert second.run(use) == [errno.EPERM] * 4
    assert (other.held(), qg.sim()["clients"]) == (0, 1)  # made above


needs_numbers = pytest.mark.skipif(not qg.LAST_PID.exists(), reason="this kernel gives no number that is asked for")


@pytest.fixture
def two(pod):
    """Pods of which one has what the other wants."""
    return pod("has", memory=64 * MIB + ROOM), pod("wants", memory=64 * MIB + ROOM)


def outlived(pod):
    """A process that has ended, of whose client another goes on; its number, and the other one."""
    first, heir = pod.process(), pod.process()
    first.run(program)
    heir.run(succeed, *first.run(lasting))
    first.kill()
    return first.pid, heir


@needs_numbers
def test_a_makers_number_taken_later_shares_nothing(two):
    """RM knows the processes of clients by number: a neighbour's has ended, and a pod's has its number now."""
    has, wants = two
    number, heir = outlived(has)
    memory = heir.run(take, 16 * MIB)
    client = heir.run(lasting)[1]["client"]
    thief = wants.numbered(number)
    thief.run(program)

    assert thief.run(duplicate, client, memory) == -nv.NO_PERMISSION
    assert (wants.held(), wants.info().refused_allocs) == (0, 1)


@needs_numbers
def test_a_makers_number_had_before_shares_nothing(two):
    """A pod's process has ended, and a neighbour's has its number now."""
    has, wants = two
    number, heir = outlived(wants)
    victim = has.numbered(number)
    victim.run(program)
    memory = victim.run(take, 16 * MIB)
    client = victim.run(lasting)[1]["client"]

    assert heir.run(duplicate, client, memory) == -nv.NO_PERMISSION
    assert (wants.held(), wants.info().refused_allocs) == (0, 1)
