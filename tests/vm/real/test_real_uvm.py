"""NVIDIA's own UVM under the module: its answers are its own, and what a pod maps of it counts against the limit.

The card does not work, so no memory of it is ever taken: what is charged is what UVM could take.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from pathlib import Path

import modules
import pytest
import qg
import real_uvm as uvm
from real_uvm import MIB

LIMIT = 512 * MIB
#: The functions of both modules that qgpu.ko probes (toctou.c, uvm.c, uvm_mem.c).
PROBED = ("rm_ioctl", "os_memcpy_from_user", "os_memcpy_to_user", "nvUvmInterfaceDupMemory")
PROBED += ("nvUvmInterfaceFreeDupedHandle", "uvm_mmap_entry", "uvm_vm_close_managed_entry", "uvm_release_entry")
PROBED += ("uvm_va_space_create", "uvm_api_map_dynamic_parallelism_region", "uvm_api_map_external_sparse")
PROBED += ("uvm_api_alloc_semaphore_pool", "uvm_api_map_external_allocation")
PROBED += ("nvUvmInterfaceDupAddressSpace", "nvUvmInterfaceRetainChannel")


@pytest.fixture(autouse=True)
def _uvm(_driver):
    with modules.uvm():
        yield


@pytest.fixture
def limited(web):
    web.grant(memory=LIMIT)
    assert web.process().run(uvm.start) == uvm.OK
    return web


def held(pod):
    return int(pod.usage().memory)


def talk(_state):
    """What UVM says without a card, as far as it does not change from call to call."""
    state = {}
    said = [uvm.start(state), uvm.again(state, 0)]
    fd = state["uvm"]
    at = uvm.take(state, 4 * MIB)
    said += [at > 0, uvm.touch(state, at, 4 * MIB), uvm.take(state, MIB, 1)]
    said += [uvm.ask(fd, uvm.VALIDATE, at, MIB), uvm.ask(fd, uvm.VALIDATE, 1 << 40, MIB)]
    said += [uvm.ask(fd, uvm.PAGEABLE), uvm.ask(fd, uvm.PREFER, at, MIB, 0, 0), uvm.ask(fd, uvm.REGISTER_GPU, 1, 2)]
    base = uvm.reserve(4 * MIB)
    said += [uvm.ask(fd, uvm.CREATE_EXTERNAL, base, 4 * MIB), uvm.ask(fd, uvm.CREATE_EXTERNAL, base, 4 * MIB)]
    for number in (uvm.MAP_EXTERNAL, uvm.DYNAMIC_PARALLELISM, 99, 999):
        try:
            said.append(uvm.ask(fd, number, base, 4 * MIB, size=16384))
        except OSError as error:
            said.append(error.errno)
    status, pool = uvm.semaphores(state)
    said += [status, uvm.free(state, pool, uvm.BLOCK), uvm.free(state, pool, uvm.BLOCK), uvm.free(state, base, 4 * MIB)]
    said += [uvm.give_back(state, at + MIB, MIB), uvm.touch(state, at, MIB), uvm.touch(state, at + 2 * MIB, 2 * MIB)]
    uvm.give_back(state, at, 4 * MIB)
    os.close(fd)
    return said


def test_uvm_is_bounded_from_its_loading_on(qgpu):
    assert modules.flags(qgpu, "SEALED", "MANAGED") == {"SEALED", "MANAGED"}
    qg.rmmod("nvidia_uvm")
    assert modules.flags(qgpu, "SEALED", "MANAGED") == {"SEALED"}
    modules.load_uvm()

    assert modules.flags(qgpu, "SEALED", "MANAGED") == {"SEALED", "MANAGED"}


def test_uvm_says_the_same_to_pods_as_without_the_module():
    """Twice without, so that what UVM answers differently by itself would show."""
    plain = talk({}), talk({})
    modules.load()
    device = qg.Qgpu()
    free, limited = qg.Pod(device, "free"), qg.Pod(device, "web", memory=LIMIT)
    inside = free.process().run(talk), limited.process().run(talk)
    outside = talk({})
    limited.close()
    free.close()
    device.close()
    modules.unload()

    assert plain[0] == plain[1] == outside == inside[0]
    # of a second UVM_INITIALIZE UVM compares the flags, and a pod with a limit got DISABLE_HMM
    assert inside[1] == [plain[0][0], uvm.BAD_ARGUMENT, *plain[0][2:]]
    assert plain[0][:5] == [uvm.OK, uvm.OK, True, 0, -errno.EINVAL]


def test_managed_memory_counts_from_its_mapping_to_its_unmapping(limited):
    (process,) = limited.processes
    first, second = process.run(uvm.take, 16 * MIB), process.run(uvm.take, 8 * MIB)
    assert process.run(uvm.touch, first, 16 * MIB) == 0
    assert held(limited) == uvm.cost(24 * MIB)
    process.run(uvm.give_back, first, 16 * MIB)
    assert held(limited) == uvm.cost(8 * MIB)
    process.run(uvm.give_back, second + 2 * MIB, 2 * MIB)
    assert held(limited) == uvm.cost(6 * MIB)
    process.run(uvm.give_back, second, 8 * MIB)

    assert held(limited) == 0


def test_oversized_mapping_is_refused_without_trace(limited):
    (process,) = limited.processes
    assert process.run(uvm.take, 384 * MIB) == -errno.ENOMEM
    assert (held(limited), limited.info().refused_allocs) == (0, 1)

    assert process.run(uvm.take, 380 * MIB) > 0


def test_mappings_that_uvm_refuses_do_not_add_up(limited):
    (process,) = limited.processes
    for _ in range(3):
        assert process.run(uvm.take, 200 * MIB, 1) == -errno.EINVAL

    assert process.run(uvm.take, 300 * MIB) > 0
    assert held(limited) == uvm.cost(300 * MIB)


@pytest.mark.parametrize("how", ["exit", "kill", "close"])
def test_what_ends_a_mapping_ends_the_charge(limited, how):
    (process,) = limited.processes
    at = process.run(uvm.take, 40 * MIB)
    process.run(uvm.touch, at, MIB)
    process.run(uvm.take, 6 * MIB)
    if how == "close":
        process.run(lambda state: os.close(state["uvm"]))
        assert held(limited) == uvm.cost(46 * MIB), "the mappings hold the file"
        process.run(uvm.give_back, at, 40 * MIB)
        assert held(limited) == uvm.cost(6 * MIB)
    process.kill() if how == "kill" else process.stop()

    qg.until(lambda: held(limited) == 0)


def test_ended_address_space_is_uncharged_despite_child_file(limited):
    def fork(state):
        state["child"] = os.fork()
        while not state["child"]:
            time.sleep(1)
        return state["child"]

    (process,) = limited.processes
    process.run(uvm.take, 40 * MIB)
    child = process.run(fork)
    process.kill()
    try:
        qg.until(lambda: held(limited) == 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_maps_its_parents_file_is_refused_by_uvm(limited):
    """It would be if it were not for sharing mode, which the module takes from a pod with a limit."""

    def in_child(state):
        pid = os.fork()
        if not pid:
            os._exit(-uvm.take(state, 4 * MIB))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    process = limited.process()
    assert process.run(uvm.start, uvm.SHARING) == uvm.OK

    assert process.run(in_child) == errno.EOPNOTSUPP
    assert held(limited) == 0
    process.run(uvm.take, 40 * MIB)
    assert process.run(in_child) == errno.EOPNOTSUPP
    assert held(limited) == uvm.cost(40 * MIB)


def test_hmm_is_off_under_a_limit(limited):
    (process,) = limited.processes

    assert process.run(uvm.again, uvm.DISABLE_HMM) == uvm.OK


def test_without_a_limit_nothing_is_looked_at(web):
    process = web.process()
    assert process.run(uvm.start, uvm.SHARING) == uvm.OK

    assert process.run(uvm.take, 1024 * MIB) > 0
    assert held(web) == 0
    assert process.run(uvm.again, uvm.SHARING) == uvm.OK


def test_page_tables_of_semaphores_are_charged_and_limited(limited):
    def fill(state):
        state["pools"] = [uvm.semaphores(state) for _ in range(12)]
        return state["pools"]

    (process,) = limited.processes
    least = 4 * uvm.TABLE  # one of each level
    limited.grant(memory=10 * least)
    pools = process.run(fill)

    assert [status for status, _ in pools] == 10 * [uvm.OK] + 2 * [uvm.NO_MEMORY]
    assert held(limited) == sum(uvm.tables(base, uvm.BLOCK) for _, base in pools[:10]) == 10 * least
    process.stop()
    qg.until(lambda: held(limited) == 0)


def test_external_mapping_that_uvm_refuses_costs_nothing(limited):
    """Of a card that UVM does not have."""

    def map_external(state):
        base = uvm.reserve(4 * MIB)
        uvm.ask(state["uvm"], uvm.CREATE_EXTERNAL, base, 4 * MIB)
        return uvm.map_external(state, base, 4 * MIB)

    (process,) = limited.processes
    assert process.run(map_external) not in (uvm.OK, uvm.NO_MEMORY)

    assert held(limited) == 0


def test_unseen_mapping_counts_from_the_next_mapping(limited):
    """The module lets go and comes back; the process stays."""
    (process,) = limited.processes
    process.run(uvm.take, 16 * MIB)
    modules.enforce(False)
    assert held(limited) == 0
    process.run(uvm.take, 16 * MIB)
    modules.enforce(True)
    process.run(uvm.take, 8 * MIB)

    assert held(limited) == uvm.cost(40 * MIB)


def test_mapping_moved_by_mremap_stays_charged(limited):
    """UVM may disable a mapping that moves, but the address space is there."""

    def move(state, at, size):
        to = uvm.reserve(size)
        uvm.libc.mremap.restype = ctypes.c_void_p
        uvm.libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        return uvm.libc.mremap(at, size, size, 3, to) == to

    (process,) = limited.processes
    at = process.run(uvm.take, 8 * MIB)
    assert process.run(move, at, 8 * MIB)
    process.run(uvm.take, 2 * MIB)

    assert held(limited) >= uvm.cost(2 * MIB)
    process.stop()
    qg.until(lambda: held(limited) == 0)


def test_every_probe_is_placed_on_the_real_functions(qgpu):
    lines = Path("/sys/kernel/debug/kprobes/list").read_text().splitlines()
    print("\n".join(lines))
    found = {line.split()[2].partition("+")[0]: line for line in lines}

    assert set(PROBED) <= set(found)
    assert all("[FTRACE]" in line for name, line in found.items() if name.startswith("uvm_"))
    assert not [line for line in lines if "[DISABLED]" in line or "[GONE]" in line]
