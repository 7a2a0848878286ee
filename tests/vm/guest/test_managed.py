"""Managed memory: mappings of /dev/nvidia-uvm count against the pod's limit for as long as they are there."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from pathlib import Path

import nv
import pytest
import qg

MIB = 1 << 20
INITIALIZE, DISABLE_HMM, SHARING = 0x30000001, 1, 2
PARAMETERS = Path("/sys/module/nvidia_uvm/parameters")
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
PROT_NONE, PROT_RW, SHARED, PRIVATE, FIXED, ANONYMOUS = 0, 3, 0x01, 0x02, 0x10, 0x20


def start(state, flags=0):
    state["p"] = nv.Program()
    state["uvm"] = os.open("/dev/nvidia-uvm", os.O_RDWR)
    fcntl.ioctl(state["uvm"], INITIALIZE, bytearray(struct.pack("QQ", flags, 0)), True)


def take(state, size, protection=PROT_RW):
    """Map managed memory, as libcuda does: over a reservation, at an offset equal to its address."""
    at = libc.mmap(None, size, PROT_NONE, PRIVATE | ANONYMOUS, -1, 0)
    got = libc.mmap(at, size, protection, SHARED | FIXED, state["uvm"], at)
    return got if got == at else -ctypes.get_errno()


def give_back(state, at, size):
    return libc.munmap(at, size)


def allocate(state, size):
    try:
        return state["p"].memory(size)
    except nv.RmError as error:
        return -error.status


MAP, UNMAP = 0x5101, 0x5102


def map_memory(state, handle):
    fcntl.ioctl(state["uvm"], MAP, struct.pack("II", state["p"].client, handle))


def unmap(state):
    fcntl.ioctl(state["uvm"], UNMAP)


def mapped():
    return int((PARAMETERS / "mapped").read_text())


@pytest.fixture(autouse=True)
def _uvm(_driver):
    qg.insmod("nvidia-uvm.ko")
    yield
    qg.rmmod("nvidia_uvm")


@pytest.fixture
def web(qgpu, pod):
    assert qgpu.info().flags & qg.uapi.NUMBERS["QGPU_INFO_MANAGED"]
    made = pod("web", memory=64 * MIB)
    made.process().run(start)
    return made


def test_managed_memory_counts_from_its_mapping_to_its_unmapping(web):
    (process,) = web.processes
    first, second = process.run(take, 16 * MIB), process.run(take, 8 * MIB)
    assert web.usage().memory == 24 * MIB
    process.run(give_back, first, 16 * MIB)
    assert web.usage().memory == 8 * MIB
    process.run(give_back, second + 4 * MIB, 4 * MIB)

    assert (web.usage().memory, mapped()) == (4 * MIB, 4 * MIB)


def test_what_does_not_fit_is_refused_as_out_of_memory_and_leaves_nothing(qgpu, web):
    (process,) = web.processes
    qgpu.events()
    assert process.run(take, 65 * MIB) == -errno.ENOMEM

    assert (web.usage().memory, mapped(), web.info().refused_allocs) == (0, 0, 1)
    assert qg.uapi.NUMBERS["QGPU_EVENT_MEMORY_REFUSED"] in [event.type for event in qgpu.events()]
    assert process.run(take, 64 * MIB) > 0


def test_managed_and_other_memory_share_one_limit(web):
    (process,) = web.processes
    assert process.run(take, 40 * MIB) > 0
    assert process.run(allocate, 40 * MIB) == -nv.NO_MEMORY
    assert process.run(allocate, 20 * MIB) > 0

    assert process.run(take, 8 * MIB) == -errno.ENOMEM


def test_all_processes_of_a_pod_share_one_limit(web):
    other = web.process()
    other.run(start)
    web.processes[0].run(take, 40 * MIB)

    assert other.run(take, 40 * MIB) == -errno.ENOMEM
    assert other.run(take, 24 * MIB) > 0


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_process_that_ends_gives_it_back(web, how):
    (process,) = web.processes
    process.run(take, 40 * MIB)
    process.stop() if how == "exit" else process.kill()

    qg.until(lambda: web.usage().memory == 0)


def test_mappings_that_the_driver_refuses_do_not_add_up(web):
    (process,) = web.processes
    for _ in range(3):
        assert process.run(take, 32 * MIB, 1) == -errno.EINVAL

    assert process.run(take, 64 * MIB) > 0
    assert web.usage().memory == 64 * MIB


def test_memory_that_uvm_holds_stays_charged_without_a_handle(web):
    """Programs that release memory before they unmap it, and those that go on taking more."""
    (process,) = web.processes
    handle = process.run(allocate, 48 * MIB)
    process.run(map_memory, handle)
    process.run(lambda state, handle: state["p"].free(handle), handle)

    assert web.usage().memory == 48 * MIB
    assert process.run(allocate, 32 * MIB) == -nv.NO_MEMORY
    process.run(unmap)
    assert web.usage().memory == 0
    assert process.run(allocate, 64 * MIB) > 0


def test_memory_that_uvm_holds_is_charged_once(web):
    (process,) = web.processes
    handle = process.run(allocate, 48 * MIB)
    process.run(map_memory, handle)
    assert web.usage().memory == 48 * MIB
    process.run(unmap)
    assert web.usage().memory == 48 * MIB
    process.run(lambda state, handle: state["p"].free(handle), handle)

    assert web.usage().memory == 0


def test_memory_that_uvm_holds_is_free_when_the_process_ends(web):
    (process,) = web.processes
    process.run(map_memory, process.run(allocate, 48 * MIB))
    process.stop()

    assert (web.usage().memory, qg.sim()["free"]) == (0, qg.sim()["total"])


def test_hmm_is_off_under_a_limit(web):
    web.process().run(start, SHARING)

    assert int((PARAMETERS / "init_flags").read_text()) == DISABLE_HMM


def test_without_a_limit_nothing_is_looked_at(pod):
    free = pod("free")
    process = free.process()
    process.run(start, SHARING)

    assert process.run(take, 128 * MIB) > 0
    assert free.usage().memory == 0
    assert int((PARAMETERS / "init_flags").read_text()) == SHARING


def test_what_was_mapped_while_nobody_looked_counts_from_the_next_mapping(web):
    """The module lets go and comes back; the process stays."""
    (process,) = web.processes
    enforce = Path("/sys/module/qgpu/parameters/enforce")
    process.run(take, 16 * MIB)
    enforce.write_text("0")
    assert web.usage().memory == 0
    process.run(take, 16 * MIB)
    enforce.write_text("1")
    process.run(take, 8 * MIB)

    assert web.usage().memory == 40 * MIB


def test_uvm_may_come_after_the_module_and_go_before_it(qgpu, pod):
    qg.rmmod("nvidia_uvm")
    assert not qgpu.info().flags & qg.uapi.NUMBERS["QGPU_INFO_MANAGED"]
    qg.insmod("nvidia-uvm.ko")
    web = pod("web", memory=64 * MIB)
    process = web.process()
    process.run(start)

    assert qgpu.info().flags & qg.uapi.NUMBERS["QGPU_INFO_MANAGED"]
    assert process.run(take, 65 * MIB) == -errno.ENOMEM
