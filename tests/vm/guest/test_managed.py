"""What UVM takes: its mappings and their page tables count against the pod's limit for as long as they are there."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nv
import pytest
import qg
from programs import MIB, ROOM, program

INITIALIZE, DISABLE_HMM, SHARING = 0x30000001, 1, 2
PARAMETERS = Path("/sys/module/nvidia_uvm/parameters")
ENFORCE = Path("/sys/module/qgpu/parameters/enforce")
TRACING, SYMBOLS = Path("/sys/kernel/tracing"), Path("/proc/kallsyms")
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
PROT_NONE, PROT_RW, SHARED, PRIVATE, FIXED, ANONYMOUS = 0, 3, 0x01, 0x02, 0x10, 0x20


BLOCK, BLOCK_TABLES, BATCH, TABLE = 2 * MIB, 8 << 10, 128 * MIB, 4 << 10


def cost(size):
    """What managed memory that fills its blocks is charged (docs/decisions/0008)."""
    blocks = size // BLOCK
    return blocks * (BLOCK + BLOCK_TABLES) + (BATCH if blocks > 1 else 0)


def tables(size):
    """What the page tables of memory that is mapped at 0 are charged: one of each level at least."""
    return TABLE * sum(-(-size // (1 << bits)) for bits in (21, 29, 38, 47))


def start(state, flags=0):
    state["p"] = nv.Program()
    state["uvm"] = os.open("/dev/nvidia-uvm", os.O_RDWR)
    fcntl.ioctl(state["uvm"], INITIALIZE, bytearray(struct.pack("QQ", flags, 0)), True)


def take(state, size, protection=PROT_RW):
    """Map managed memory, as libcuda does: over a reservation, at an offset equal to its address, from a block on."""
    at = libc.mmap(None, size + BLOCK, PROT_NONE, PRIVATE | ANONYMOUS, -1, 0)
    at += -at % BLOCK
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


def map_memory(state, handle, client=None, length=48 * MIB, cards=1):
    fcntl.ioctl(state["uvm"], MAP, struct.pack("QQIIQ", 0, length, client or state["p"].client, handle, cards))


def try_map(state, handle, length, client=None, cards=1):
    try:
        map_memory(state, handle, client, length, cards)
    except OSError as error:
        return error.errno
    return 0


def unmap(state):
    fcntl.ioctl(state["uvm"], UNMAP)


def mapped():
    return int((PARAMETERS / "mapped").read_text())


@pytest.fixture(scope="module", autouse=True)
def _uvm(_driver):
    qg.insmod("nvidia-uvm.ko")
    yield
    qg.rmmod("nvidia_uvm")


@pytest.fixture
def web(qgpu, pod):
    assert qgpu.info().flags & qg.uapi.NUMBERS["QGPU_INFO_MANAGED"]
    made = pod("web", memory=512 * MIB + ROOM)
    made.process().run(start)
    return made


def test_managed_memory_counts_from_its_mapping_to_its_unmapping(web):
    (process,) = web.processes
    first, second = process.run(take, 16 * MIB), process.run(take, 8 * MIB)
    assert web.held() == cost(24 * MIB)
    process.run(give_back, first, 16 * MIB)
    assert web.held() == cost(8 * MIB)
    process.run(give_back, second + 4 * MIB, 4 * MIB)

    assert (web.held(), mapped()) == (cost(4 * MIB), 4 * MIB)


def test_part_of_a_block_is_charged_as_all_of_it(web):
    """UVM takes whole pieces of the card; the block of semaphores that every CUDA program has takes one."""
    (process,) = web.processes
    at = process.run(take, 64 << 10)
    assert web.held() == cost(BLOCK)
    process.run(give_back, at, 32 << 10)
    assert web.held() == cost(BLOCK)
    process.run(give_back, at + (32 << 10), 32 << 10)

    assert web.held() == 0


def test_oversized_alloc_fails_as_out_of_memory_without_trace(qgpu, web):
    (process,) = web.processes
    qgpu.events()
    assert process.run(take, 384 * MIB) == -errno.ENOMEM

    assert (web.held(), mapped(), web.info().refused_allocs) == (0, 0, 1)
    assert qg.uapi.NUMBERS["QGPU_EVENT_MEMORY_REFUSED"] in [event.type for event in qgpu.events()]
    assert process.run(take, 380 * MIB) > 0


def test_managed_and_other_memory_share_one_limit(web):
    (process,) = web.processes
    assert process.run(take, 200 * MIB) > 0
    assert process.run(allocate, 200 * MIB) == -nv.NO_MEMORY
    assert process.run(allocate, 150 * MIB) > 0

    assert process.run(take, 40 * MIB) == -errno.ENOMEM


def test_all_processes_of_a_pod_share_one_limit(web):
    other = web.process()
    other.run(start)
    web.processes[0].run(take, 100 * MIB)

    assert other.run(take, 200 * MIB) == -errno.ENOMEM
    assert other.run(take, 100 * MIB) > 0


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_process_that_ends_gives_it_back(web, how):
    (process,) = web.processes
    process.run(take, 40 * MIB)
    process.run(take, 6 * MIB)
    process.stop() if how == "exit" else process.kill()

    qg.until(lambda: web.held() == 0)


def test_ended_address_space_is_uncharged_despite_child_file(web):
    def fork(state):
        state["child"] = os.fork()
        while not state["child"]:
            time.sleep(1)
        return state["child"]

    (process,) = web.processes
    process.run(take, 40 * MIB)
    child = process.run(fork)
    process.kill()
    try:
        qg.until(lambda: web.held() == 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_mappings_that_the_driver_refuses_do_not_add_up(web):
    (process,) = web.processes
    for _ in range(3):
        assert process.run(take, 200 * MIB, 1) == -errno.EINVAL

    assert process.run(take, 300 * MIB) > 0
    assert web.held() == cost(300 * MIB)


def test_a_mapping_that_the_driver_refuses_costs_nothing(web):
    """The file was not initialised."""

    def too_early(state):
        state["uvm"] = os.open("/dev/nvidia-uvm", os.O_RDWR)
        return take(state, 40 * MIB)

    assert web.process().run(too_early) == -errno.EBADFD
    assert web.held() == 0


def test_a_child_that_maps_leaves_its_parents_charge_alone(web):
    def in_child(state):
        pid = os.fork()
        if not pid:
            os._exit(max(0, -take(state, 4 * MIB)))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    (process,) = web.processes
    process.run(take, 40 * MIB)

    assert process.run(in_child) == errno.EOPNOTSUPP
    assert web.held() == cost(40 * MIB)


def test_memory_that_uvm_holds_stays_charged_without_a_handle(web):
    """Programs that release memory before they unmap it, and those that go on taking more."""
    (process,) = web.processes
    handle = process.run(allocate, 400 * MIB)
    process.run(map_memory, handle)
    process.run(lambda state, handle: state["p"].free(handle), handle)

    assert web.held() == 400 * MIB + tables(48 * MIB)
    assert process.run(allocate, 113 * MIB) == -nv.NO_MEMORY
    process.run(unmap)
    assert web.held() == 0
    assert process.run(allocate, 512 * MIB) > 0


def test_memory_that_uvm_holds_is_charged_once(web):
    (process,) = web.processes
    handle = process.run(allocate, 48 * MIB)
    process.run(map_memory, handle)
    assert web.held() == 48 * MIB + tables(48 * MIB)
    process.run(unmap)
    assert web.held() == 48 * MIB
    process.run(lambda state, handle: state["p"].free(handle), handle)

    assert web.held() == 0


def test_memory_that_uvm_holds_is_free_when_the_process_ends(web):
    (process,) = web.processes
    process.run(map_memory, process.run(allocate, 48 * MIB))
    process.stop()

    assert (web.held(), qg.used()) == (0, 0)


def test_page_tables_of_mappings_are_charged_and_limited(web):
    """One piece of memory, mapped over and over: the card gives page tables each time."""
    (process,) = web.processes
    web.grant(memory=16 * MIB + 10 * tables(512 * MIB) + qg.SPACE)
    handle = process.run(allocate, 16 * MIB)
    answers = [process.run(try_map, handle, 512 * MIB) for _ in range(12)]

    assert answers == 10 * [0] + 2 * [errno.EINVAL]
    assert qg.used() == web.held() == 16 * MIB + 10 * tables(512 * MIB)


def test_page_tables_stay_charged_at_peak_until_none_is_left(web):
    """UVM gives a piece of the card back when nothing lies in it any more."""
    (process,) = web.processes
    handle = process.run(allocate, 16 * MIB)
    for _ in range(2):
        assert process.run(try_map, handle, 64 * MIB) == 0
    process.run(unmap)
    assert web.held() == 16 * MIB + 2 * tables(64 * MIB)
    process.run(try_map, handle, 64 * MIB)
    assert web.held() == 16 * MIB + 2 * tables(64 * MIB)
    process.run(unmap)
    process.run(unmap)

    assert web.held() == 16 * MIB


def test_page_tables_of_a_mapping_must_fit_on_each_card(web):
    """A call maps for several cards, and takes tables for each."""
    (process,) = web.processes
    web.grant(memory=16 * MIB + 3 * tables(512 * MIB) + qg.SPACE)
    handle = process.run(allocate, 16 * MIB)
    answers = [process.run(try_map, handle, 512 * MIB, None, 2) for _ in range(2)]

    assert answers == [0, errno.EINVAL]
    assert qg.used() <= web.held() == 16 * MIB + 3 * tables(512 * MIB)


@pytest.mark.parametrize("number", [65, 68, 74], ids=["dynamic parallelism", "semaphores", "sparse"])
def test_page_tables_of_empty_mappings_are_charged_and_limited(web, number):
    """Any place will do for them, and each takes tables of all levels."""

    def map_tables(state, number, base):
        try:
            fcntl.ioctl(state["uvm"], number, struct.pack("QQ", base, 1 << 16).ljust(40, bytes(1)))
        except OSError as error:
            return error.errno
        return 0

    (process,) = web.processes
    web.grant(memory=10 * tables(1 << 16) + qg.SPACE)
    answers = [process.run(map_tables, number, base << 47) for base in range(12)]

    assert answers == 10 * [0] + 2 * [errno.EINVAL]
    assert qg.used() == web.held() == 10 * tables(1 << 16)
    process.stop()
    assert web.held() == 0


def test_page_tables_are_charged_until_uvm_has_freed_them(web, parameter):
    first, second = web.processes[0], web.process()
    second.run(start)
    first.run(lambda state: fcntl.ioctl(state["uvm"], 74, struct.pack("QQ", 0, 1 << 16)))
    held = web.held()
    parameter("uvm_held", 1)
    first.start(lambda state: os.close(state["uvm"]))
    qg.until(lambda: waiting() == 1)
    early = web.held()
    parameter("uvm_held", 0)
    first.result()

    assert (held, early, web.held()) == (tables(1 << 16), tables(1 << 16), 0)


def test_a_mapping_that_fails_costs_nothing(web):
    (process,) = web.processes

    assert process.run(try_map, 0x5CFFFFFF, 64 * MIB) == errno.EINVAL
    assert process.run(try_map, 0x5CFFFFFF, 64 * MIB, None, 0) == errno.EINVAL  # before UVM duplicates anything
    assert web.held() == 0


def test_memory_is_not_mapped_before_its_alloc_returns(web, late):
    """A handle can be guessed. But what RM has made may yet be refused, and no program maps it so early."""
    maker, mapper = web.processes[0], web.process()
    mapper.run(start)
    client, handle = maker.run(lambda state: (state["p"].client, state["p"].last + 1))
    late(1000000)
    maker.start(allocate, 48 * MIB)
    qg.until(lambda: qg.used() > 0)
    late(0)

    assert mapper.run(try_map, handle, 48 * MIB, client) == errno.EINVAL
    assert maker.result() == handle
    assert qg.used() == web.held() == 48 * MIB
    assert mapper.run(try_map, handle, 48 * MIB, client) == 0


def test_mappings_of_a_pod_without_a_limit_are_bounded(pod):
    """Else calls of other pods would look through all of them."""
    free_pod = pod("free")
    process = free_pod.process()
    process.run(start)
    handle = process.run(allocate, 64 << 10)
    bound = Path("/sys/module/qgpu/parameters/entries_max")
    before = bound.read_text()
    bound.write_text("8")
    answers = [process.run(try_map, handle, 64 << 10) for _ in range(10)]
    process.run(unmap)
    again = process.run(try_map, handle, 64 << 10)
    bound.write_text(before)

    assert (answers, again) == (8 * [0] + 2 * [errno.EINVAL], 0)
    assert free_pod.info().refused_objects == 2


@pytest.fixture
def times_others_may_run(module) -> Iterator[Callable[[Callable[[], object]], int]]:
    """Return how often this process lets others run in the kernel while it does something."""
    name = next(name for name in ("__cond_resched", "_cond_resched") if f" {name}\n" in SYMBOLS.read_text())
    if not TRACING.joinpath("kprobe_events").exists():
        qg.mount("tracefs", TRACING)
    if not TRACING.joinpath("kprobe_events").exists():
        pytest.skip("this kernel has no events by kprobes")
    events, trace = TRACING / "kprobe_events", TRACING / "trace"
    events.write_text(f"p:qg/lets {name}")
    (TRACING / "events/qg/lets/filter").write_text(f"common_pid == {os.getpid()}")
    enable = TRACING / "events/qg/enable"

    def times(do: Callable[[], object]) -> int:
        trace.write_text("")
        enable.write_text("1")
        do()
        enable.write_text("0")  # reading what was written lets others run, too
        return trace.read_text().count(": lets: (")

    yield times
    events.write_text("")


def test_switching_off_with_many_mappings_lets_others_run(pod, times_others_may_run):
    """A pod decides how much UVM holds; the module forgets all of it at once."""

    def map_times(state, handle, count):
        for _ in range(count):
            map_memory(state, handle, None, 64 << 10)

    def switch_off():
        times = times_others_may_run(lambda: ENFORCE.write_text("0"))
        ENFORCE.write_text("1")
        return times

    before = switch_off()
    process = pod("free").process()
    process.run(start)
    process.run(map_times, process.run(allocate, 64 << 10), 1000)
    after = switch_off()
    process.run(unmap)

    if not before:
        pytest.skip("this kernel takes the CPU from tasks by itself")
    assert after >= before + 1000


def open_uvm(state):
    state["p"], state["uvm"] = nv.Program(), os.open("/dev/nvidia-uvm", os.O_RDWR)
    return os.getpid(), state["uvm"]


def initialize(state, flags=0):
    fcntl.ioctl(state["uvm"], INITIALIZE, bytearray(struct.pack("QQ", flags, 0)), True)


def receive(state, pid, fd):
    state["uvm"] = qg.take_descriptor(pid, fd)


@pytest.fixture
def heirs(qgpu, pod):
    """Hand a file of UVM to a process of another pod, and end the first pod when it has done something with it."""
    ended, made = pod("ended", memory=512 * MIB + ROOM), pod("heirs", memory=256 * MIB + ROOM)

    def end(first, *args):
        process, heir = ended.process(), made.process()
        named = process.run(open_uvm)
        process.run(first, *args)
        heir.run(receive, *named)
        process.kill()
        qgpu.ioctl("POD_REMOVE", pod=ended.id)
        heir.run(initialize)
        return made

    return end


def test_a_file_of_an_ended_pod_is_charged_to_its_heir(heirs):
    """UVM refuses the first pod's mapping, because nobody has initialised the file."""
    web = heirs(take, 2 * MIB)
    (process,) = web.processes

    assert process.run(take, 512 * MIB) == -errno.ENOMEM
    assert process.run(take, 32 * MIB) > 0
    assert web.usage().memory == cost(32 * MIB)


def test_what_an_ended_pod_left_in_a_file_keeps_others_out(heirs):
    def use(state):
        fcntl.ioctl(state["uvm"], INITIALIZE, bytearray(struct.pack("QQ", 0, 0)), True)
        fcntl.ioctl(state["uvm"], 74, struct.pack("QQ", 0, 48 * MIB))

    web = heirs(use)
    (process,) = web.processes

    assert process.run(take, 2 * MIB) == -errno.ENOMEM
    with pytest.raises(OSError, match="Invalid"):
        process.run(lambda state: fcntl.ioctl(state["uvm"], 74, struct.pack("QQ", 0, 48 << 20)))
    assert (web.usage().memory, web.info().refused_allocs) == (0, 2)


def test_what_another_pod_shares_with_all_is_not_mapped(web, pod):
    """The simulated driver lets UVM map anything, as RM does where it is shared with all."""
    owner, (thief,) = pod("has").process(), web.processes
    owner.run(program)
    memory, client = owner.run(allocate, 48 * MIB), owner.run(lambda state: state["p"].client)

    with pytest.raises(OSError, match="Invalid"):
        thief.run(map_memory, memory, client)
    thief.run(map_memory, thief.run(allocate, 48 * MIB))
    assert web.held() == 48 * MIB + tables(48 * MIB)


@pytest.mark.parametrize("register", [0x5103, 0x5104], ids=["address space", "channel"])
@pytest.mark.parametrize("limit", [{}, {"memory": 64 * MIB + ROOM}], ids=["no limit", "a limit"])
def test_what_another_pod_has_is_not_registered(pod, register, limit):
    """The simulated driver lets UVM register anything, as RM does of what a process of the same number has made."""

    def make(state, cls):
        p = state["p"]
        return p.client, p.alloc(p.device, cls, bytes(368))

    def enter(state, cmd, client, handle):
        try:
            fcntl.ioctl(state["uvm"], cmd, struct.pack("II", client, handle))
        except OSError as error:
            return error.errno
        return 0

    owner, thief = pod("has").process(), pod("wants", **limit).process()
    outside = qg.Process(None)
    for each in (owner, thief, outside):
        each.run(start)
    cls = nv.VASPACE if register == 0x5103 else nv.CHANNEL

    assert thief.run(enter, register, *owner.run(make, cls)) == errno.EINVAL
    assert thief.run(enter, register, *thief.run(make, cls)) == 0
    assert outside.run(enter, register, *owner.run(make, cls)) == 0
    outside.kill()


def test_a_client_exchanged_while_uvm_takes_a_space_lends_none(pod, parameter):
    """Another pod's client has the handle when RM looks it up."""

    def space(state):
        return state["p"].alloc(state["p"].device, nv.VASPACE, bytes(64))

    def enter(state, client, handle):
        try:
            fcntl.ioctl(state["uvm"], 0x5103, struct.pack("II", client, handle))
        except OSError as error:
            return error.errno
        return 0

    has, wants = pod("has"), pod("wants")
    owner, friend, thief = has.process(), wants.process(), wants.process()
    for each in (friend, thief):
        each.run(start)
    client, handle = friend.run(client_of), friend.run(space)
    parameter("uvm_held", 1)
    thief.start(enter, client, handle)
    qg.until(lambda: waiting() == 1)
    friend.run(free, client)
    parameter("next_client", client)
    owner.run(start)
    owner.run(lambda state, handle: state["p"].alloc(state["p"].device, nv.VASPACE, bytes(64), handle), handle)
    parameter("uvm_held", 0)

    assert owner.run(client_of) == client
    assert thief.result() == errno.EINVAL


def test_hmm_is_off_under_a_limit(web):
    web.process().run(start, SHARING)

    assert int((PARAMETERS / "init_flags").read_text()) == DISABLE_HMM


def test_without_a_limit_nothing_is_looked_at(pod):
    free = pod("free")
    process = free.process()
    process.run(start, SHARING)

    assert process.run(take, 128 * MIB) > 0
    assert free.held() == 0
    assert int((PARAMETERS / "init_flags").read_text()) == SHARING


def test_unseen_mapping_counts_from_the_next_mapping(web):
    """The module lets go and comes back; the process stays."""
    (process,) = web.processes
    enforce = Path("/sys/module/qgpu/parameters/enforce")
    process.run(take, 16 * MIB)
    enforce.write_text("0")
    assert web.held() == 0
    process.run(take, 16 * MIB)
    enforce.write_text("1")
    process.run(take, 8 * MIB)

    assert web.held() == cost(40 * MIB)


def test_uvm_may_come_after_the_module_and_go_before_it(qgpu, pod):
    qg.rmmod("nvidia_uvm")
    assert not qgpu.info().flags & qg.uapi.NUMBERS["QGPU_INFO_MANAGED"]
    qg.insmod("nvidia-uvm.ko")
    web = pod("web", memory=64 * MIB)
    process = web.process()
    process.run(start)

    assert qgpu.info().flags & qg.uapi.NUMBERS["QGPU_INFO_MANAGED"]
    assert process.run(take, 65 * MIB) == -errno.ENOMEM
    assert process.run(take, BLOCK) > 0


def waiting():
    """Return how many tasks the simulated driver keeps inside UVM's calls (``uvm_held``)."""
    return int(Path("/sys/module/nvidia/parameters/uvm_waiting").read_text())


def take_side_by_side(state, *sizes):
    """Map managed memory in pieces that adjoin; the address of the first."""
    at = libc.mmap(None, sum(sizes) + BLOCK, PROT_NONE, PRIVATE | ANONYMOUS, -1, 0)
    at += -at % BLOCK
    for i, size in enumerate(sizes):
        piece = at + sum(sizes[:i])
        assert libc.mmap(piece, size, PROT_RW, SHARED | FIXED, state["uvm"], piece) == piece
    return at


@pytest.mark.parametrize("sizes", [(380 * MIB,), (2 * MIB, 378 * MIB)], ids=["one range", "two ranges"])
def test_unmapped_memory_is_charged_until_uvm_has_freed_it(web, parameter, sizes):
    """The real UVM takes up to seconds to free large memory; meanwhile the pod must not have it twice.

    The kernel takes all of the ranges out of the address space before UVM frees the first.
    """
    first, second = web.processes[0], web.process()
    second.run(start)
    at = first.run(take_side_by_side, *sizes)
    parameter("uvm_held", len(sizes))
    first.start(give_back, at, sum(sizes))
    qg.until(lambda: waiting() == 1)
    early = second.run(allocate, 256 * MIB)
    parameter("uvm_held", 0)

    assert (early, first.result(), web.held()) == (-nv.NO_MEMORY, 0, 0)
    assert second.run(allocate, 256 * MIB) > 0


def protect(state, at, size):
    return libc.mprotect(at, size, 1)


@pytest.mark.parametrize("pieces", [1, 2], ids=["whole", "split"])
def test_memory_of_a_dying_process_is_charged_until_freed(web, parameter, pieces):
    """A change of protection splits a mapping, and no call of UVM says so."""
    first, second = web.processes[0], web.process()
    second.run(start)
    at = first.run(take, 380 * MIB)
    if pieces == 2:
        assert first.run(protect, at, 2 * MIB) == 0
    parameter("uvm_held", pieces)
    os.kill(first.pid, signal.SIGKILL)
    qg.until(lambda: waiting() == 1)
    early = second.run(allocate, 256 * MIB)
    parameter("uvm_held", 0)

    assert early == -nv.NO_MEMORY
    qg.until(lambda: web.held() == 0)


def replace(state, at, size):
    return libc.mmap(at, size, PROT_NONE, PRIVATE | FIXED | ANONYMOUS, -1, 0)


def test_ranges_that_another_mapping_replaces_are_uncharged(web):
    """Since 6.12 they are still in the address space when UVM has freed them."""
    (process,) = web.processes
    at = process.run(take_side_by_side, 2 * MIB, 6 * MIB)
    assert process.run(replace, at, 8 * MIB) == at

    assert (web.held(), mapped()) == (0, 0)


def map_files(state, count):
    """Map from so many files that are not initialised: UVM refuses each, and the module has an entry of each."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    at = libc.mmap(None, 2 * BLOCK, PROT_NONE, PRIVATE | ANONYMOUS, -1, 0)
    at += -at % BLOCK
    state["files"] = [os.open("/dev/nvidia-uvm", os.O_RDWR) for _ in range(count)]
    errors = []
    for file in state["files"]:
        libc.mmap(at, BLOCK, PROT_RW, SHARED | FIXED, file, at)
        errors.append(ctypes.get_errno())
    return errors


def close_files(state):
    for file in state.pop("files"):
        os.close(file)


def test_files_of_uvm_beyond_the_maximum_are_refused(web, pod):
    neighbour, (process,) = pod("has", memory=512 * MIB + ROOM).process(), web.processes
    neighbour.run(start)
    errors = process.run(map_files, 1100)

    assert (errors.count(errno.EBADFD), errors.count(errno.ENOMEM)) == (1024, 76)
    assert neighbour.run(take, 16 * MIB) > 0
    process.run(close_files)
    assert process.run(take, 16 * MIB) > 0


REGISTER_CHANNEL, UNREGISTER_CHANNEL = 0x5104, 0x5105
COMPUTE_TSG = 16 * MIB


def context(state, handles=None):
    """A compute TSG with a channel; with ``handles``, under these two."""
    p = state["p"]
    if handles is not None:
        p.last = handles[0] - 1
    tsg, (channel,) = p.compute()
    return tsg, channel


def register(state, client, channel):
    try:
        fcntl.ioctl(state["uvm"], REGISTER_CHANNEL, struct.pack("II", client, channel))
    except OSError as error:
        return error.errno
    return 0


def client_of(state):
    return state["p"].client


def free(state, handle):
    return state["p"].free(handle)


def test_a_tsg_stays_charged_until_uvm_lets_it_go(web):
    (process,) = web.processes
    tsg, channel = process.run(context)
    assert process.run(register, process.run(client_of), channel) == 0
    process.run(free, tsg)

    assert web.held() == COMPUTE_TSG
    process.run(lambda state: fcntl.ioctl(state["uvm"], UNREGISTER_CHANNEL))
    assert web.held() == 0


def test_retained_tsgs_count_to_the_limit(web):
    """512 MiB are 32 of them."""
    (process,) = web.processes
    client = process.run(client_of)
    for _ in range(32):
        tsg, channel = process.run(context)
        assert process.run(register, client, channel) == 0
        process.run(free, tsg)

    assert web.held() == 32 * COMPUTE_TSG
    with pytest.raises(nv.RmError):
        process.run(context)
    process.run(lambda state: os.close(state["uvm"]))
    assert web.held() == 0


def test_a_channel_that_the_table_lacks_is_not_registered(web):
    (process,) = web.processes
    tsg, _ = process.run(context)

    assert process.run(register, process.run(client_of), tsg) == errno.EINVAL
    assert process.run(register, process.run(client_of), 0x7777) == errno.EINVAL


def test_an_exchanged_channel_is_not_registered(web, parameter):
    """Another thread frees it and gives its handle to a channel of another TSG, while UVM registers it."""
    first, second = web.processes[0], web.process()
    second.run(start)
    handles = first.run(context)
    parameter("uvm_held", 1)
    second.start(register, first.run(client_of), handles[1])
    qg.until(lambda: waiting() == 1)
    first.run(free, handles[0])
    assert first.run(context, handles) == handles
    parameter("uvm_held", 0)

    assert second.result() == errno.EINVAL
    assert web.held() == COMPUTE_TSG
    first.run(free, handles[0])
    assert web.held() == 0


def duplicate_as(state, source, handle):
    """Another handle on what a handle of the same client is, under a given one."""
    state["p"].last = handle - 1
    state["p"].dup(state["p"].client, source)


def test_memory_exchanged_while_uvm_takes_it_is_not_hidden(web, parameter):
    """Other memory has the handle while UVM duplicates it, and only then."""
    first, second = web.processes[0], web.process()
    second.run(start)
    handle, spare = first.run(allocate, 16 * MIB), 0x5C00AA00
    first.run(duplicate_as, handle, spare)
    parameter("uvm_held", 1)
    parameter("uvm_late", 1)
    second.start(try_map, handle, 64 << 10, first.run(client_of))
    qg.until(lambda: waiting() == 1)
    first.run(free, handle)
    first.run(lambda state, size, handle: state["p"].memory(size, handle), 16 * MIB, handle)
    parameter("uvm_held", 0)
    qg.until(lambda: waiting() == 2)
    first.run(free, handle)
    first.run(duplicate_as, spare, handle)
    parameter("uvm_late", 0)
    said = second.result()

    assert qg.used() <= web.held()
    assert said == errno.EINVAL


def map_at_once(state, count):
    """Map so many pieces of memory, each from a thread of its own, and then free them."""
    handles = [state["p"].memory(64 << 10) for _ in range(count)]
    threading.stack_size(64 << 10)
    threads = [threading.Thread(target=map_memory, args=(state, handle, None, 64 << 10)) for handle in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for handle in handles:
        state["p"].free(handle)


@pytest.mark.skipif(Path("/proc/lockdep_stats").exists(), reason="too many tasks for a kernel that watches every lock")
def test_any_number_of_tasks_inside_uvm_is_counted(web, parameter):
    """1,100 at the same time: more than a probe of a return watches."""
    (process,) = web.processes
    parameter("uvm_held", 1)
    process.start(map_at_once, 1100)
    qg.until(lambda: waiting() == 1100, 240)
    parameter("uvm_held", 0)
    process.result()

    assert qg.used() <= web.held()
    assert web.held() >= 1100 * (64 << 10)
    time.sleep(2)  # the module looks once a second for calls that it did not see
    assert not web.info().flags & qg.uapi.NUMBERS["QGPU_POD_UNCHECKED"]


REGISTER_SPACE = 0x5103


def register_space(state):
    p = state["p"]
    space = p.alloc(p.device, nv.VASPACE, bytes(64))
    try:
        fcntl.ioctl(state["uvm"], REGISTER_SPACE, struct.pack("II", p.client, space))
    except OSError as error:
        return error.errno
    p.free(space)
    return 0


def test_an_address_space_stays_charged_while_uvm_has_it(web):
    (process,) = web.processes

    assert process.run(register_space) == 0
    assert web.held() == qg.SPACE
    process.run(lambda state: os.close(state["uvm"]))
    assert web.held() == 0


def test_an_address_space_is_not_registered_beyond_the_limit(pod):
    web = pod("web", memory=4 * qg.SPACE)  # the processes' devices, a space, and what UVM has of one
    first, second = web.process(), web.process()
    first.run(start)
    assert first.run(register_space) == 0
    second.run(start)

    assert second.run(register_space) == errno.EINVAL


def test_the_drivers_shared_page_is_not_mapped_for_the_card(web):
    """RM keeps only CPUs from writing there."""
    (process,) = web.processes
    page = process.run(lambda state: state["p"].alloc(state["p"].subdevice, 0xDE))

    assert process.run(try_map, page, 4096) == errno.EINVAL
    assert mapped() == 0
