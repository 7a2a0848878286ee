"""The guardian looks at what the kernel made of a continued call for memory, before another call can name it."""

from __future__ import annotations

import errno
import os
import struct
import subprocess

import pytest

from qgpu.guardian.proxy import client_registry, passthrough_memory
from qgpu.guardian.proxy.passthrough_memory import BY_ADDRESS, UNSEEN, PassthroughMemory
from qgpu.guardian.rules import escapes
from qgpu.linux import cgroup, proc, thread_freezer
from qgpu.linux.inflight_syscalls import InflightSyscalls
from qgpu.linux.open_file_set import FileSets
from qgpu.nvidia import abi, uvm
from qgpu.nvidia.rm_client import take
from tests.guardian.asked import control, dup, uvm_mapping
from tests.guardian.pod import CONTROL, CONTROL_MINOR, device_of

MEMORY_BY_ADDRESS = 0xF3


def pin(pod, rm_class=abi.NV01_MEMORY_SYSTEM_OS_DESCRIPTOR, fd=-1):
    """Ask for memory by the old call; /dev/random answers in the kernel's place."""
    asked = struct.pack("<IIII", 7, 2, 9, rm_class) + bytes(32) + struct.pack("<ii", fd, 0)
    pod.call(abi.NV_ESC_RM_ALLOC_MEMORY, asked)


def cpu_mapping(pod):
    """Map object 30 for the CPU; return the errno."""
    (size,) = [size for number, size in escapes.WATCHED if number == abi.NV_ESC_RM_MAP_MEMORY]
    return pod.call(abi.NV_ESC_RM_MAP_MEMORY, struct.pack("<III", 7, 3, 30) + bytes(size - 12))[1]


def uvm_mapping_of(pod):
    """Map object 30 for the card by UVM; return the errno."""
    return pod.uvm(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(1 << 32, 1 << 21, 30))[1]


@pytest.mark.parametrize("args", [(), (abi.NV01_MEMORY_SYSTEM, 0)], ids=["own pages", "with a mapping"])
@pytest.mark.parametrize(
    ("number", "call"),
    [(abi.NV_ESC_RM_DUP_OBJECT, dup(31, 30)), (abi.NV_ESC_RM_CONTROL, control(0x20800110))],
    ids=["dup", "control"],
)
def test_memory_by_address_is_freed_before_a_call(on_card, args, number, call):
    pin(on_card, *args)
    on_card.rm.objects[7, 30] = (MEMORY_BY_ADDRESS, 2)
    on_card.call(number, call)

    assert (7, 30) not in on_card.rm.objects
    assert (7, 31) not in on_card.rm.objects
    assert on_card.shared.refusals.counts["web", BY_ADDRESS] == 1


@pytest.mark.parametrize("others", [False, True], ids=["own control file", "another's"])
def test_such_a_call_continues_on_files_of_its_process_alone(on_card, others, monkeypatch):
    """The guardian looks for what the kernel made among the pod's clients, and the file could reach another pod's."""
    monkeypatch.setattr(abi, "NV_CONTROL_MINOR", CONTROL_MINOR)
    on_card.shared.files = files = FileSets()
    pidfd = os.pidfd_open(on_card.process.pid)
    file = take(pidfd, device_of(on_card))
    if others:
        files.makers.claim(file, 1, 0)
    pin(on_card)
    before = on_card.shared.refusals.counts["web", client_registry.OTHER_PROCESS]
    on_card.call(abi.NV_ESC_REGISTER_FD, struct.pack("<i", on_card.open(CONTROL)))
    pin(on_card)
    for fd in (file, pidfd, files.fd):
        os.close(fd)

    assert before == 1
    assert on_card.shared.refusals.counts["web", client_registry.OTHER_PROCESS] == 1 + others


def test_devices_are_looked_through_once_after_a_call(on_card):
    before = on_card.rm.looks
    on_card.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))
    assert on_card.rm.looks == before

    pin(on_card)
    for _ in range(3):
        on_card.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))
    assert on_card.rm.looks == before + 1


def test_memory_by_address_is_freed_before_uvm_maps_it_for_peers(on_card):
    on_card.limits.clear()
    pin(on_card)
    on_card.rm.objects[7, 30] = (MEMORY_BY_ADDRESS, 2)
    on_card.uvm(uvm.ALLOC_DEVICE_P2P, bytes(40) + struct.pack("<iIIi", 0, 7, 30, 0))

    assert (7, 30) not in on_card.rm.objects
    assert len(on_card.dispatcher._ctx.uvm_mappings.calls) == 1  # the next call for memory waits for it


def test_memory_below_another_pods_client_is_refused(on_card):
    on_card.shared.note({"fact": "pod", "name": "accomplice", "cgroup": "/accomplice", "grants": {}})
    on_card.shared.note({"fact": "client", "client": 8, "pod": "accomplice", "maker": 1, "users": []})
    asked = struct.pack("<IIII", 8, 2, 9, abi.NV01_MEMORY_SYSTEM_OS_DESCRIPTOR) + bytes(32) + struct.pack("<ii", -1, 0)
    answer = on_card.call(abi.NV_ESC_RM_ALLOC_MEMORY, asked)[2]

    assert struct.pack("<I", abi.NV_ERR_INVALID_CLIENT) in answer
    assert on_card.dispatcher._passthrough_memory._calls.calls == {}


def test_a_search_that_fails_does_not_end_the_successor(on_card, monkeypatch):
    def fail(*_):
        raise OSError(errno.EMFILE, "no descriptor is free")

    monkeypatch.setattr(InflightSyscalls, "find", fail)
    on_card.dispatcher = on_card.dispatcher_of(on_card.shared, on_card.number)
    on_card.dispatcher.resume(None, None)

    assert not on_card.dispatcher._passthrough_memory._found_left  # the next listener's thread tries again


def test_without_a_listing_known_processes_are_searched(on_card, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "it cannot be read")

    monkeypatch.setattr(thread_freezer, "threads_of", refuse)

    assert passthrough_memory._threads(("/web",), [os.getpid(), 1 << 22]) == proc.threads(os.getpid())


def test_known_process_that_left_the_cgroup_is_searched():
    assert passthrough_memory._threads((f"/gone-{os.getpid()}",), [os.getpid()]) >= proc.threads(os.getpid())


@pytest.mark.root
def test_pod_with_very_many_cgroups_is_searched_whole():
    top = cgroup.mount() / f"many-{os.getpid()}"
    parts = [top / str(number) for number in range(513)]
    for part in parts:
        part.mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            (parts[0] / "cgroup.procs").write_text(str(process.pid))
            assert process.pid in passthrough_memory._threads((f"/{top.name}",), ())
        finally:
            process.kill()
            process.wait()
            for each in (*parts, top):
                each.rmdir()


@pytest.fixture
def lost(on_card):
    """The pod, with a second client whose file the guardian cannot find, and which has memory by address."""
    on_card.shared.note({"fact": "client", "client": 8, "pid": on_card.process.pid, "fd": 9})
    for handle, rm_class, parent in ((8, abi.NV01_ROOT_CLIENT, 0), (2, abi.NV01_DEVICE_0, 8)):
        on_card.rm.objects[8, handle] = (rm_class, parent)
    on_card.shared.note(
        {"fact": "object", "client": 8, "handle": 2, "parent": 8, "class": abi.NV01_DEVICE_0, "detail": 0}
    )
    on_card.rm.stale.add(8)
    on_card.rm.elsewhere.add(8)
    pin(on_card)
    on_card.rm.objects[8, 30] = (MEMORY_BY_ADDRESS, 2)
    return on_card


def test_nothing_is_duplicated_from_a_client_not_looked_at(lost):
    lost.call(abi.NV_ESC_RM_DUP_OBJECT, dup(31, 30, source_client=8))

    assert (8, 30) in lost.rm.objects
    assert (7, 31) not in lost.rm.objects


def test_a_call_on_its_file_brings_the_look(lost):
    lost.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))
    assert (8, 30) in lost.rm.objects

    lost.rm.elsewhere.clear()
    lost.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))
    assert (8, 30) not in lost.rm.objects


@pytest.fixture
def waits(monkeypatch):
    """What is waited for, once in vain each time."""
    seen = []

    def wait(calls, patience_s):
        seen.extend(found := [call.proc_syscall[2] for call in calls.calls.values()])
        calls.calls.clear()
        return not found

    monkeypatch.setattr(InflightSyscalls, "wait", wait)
    return seen


def test_pods_calls_wait_until_the_call_for_memory_is_over(on_card, waits, monkeypatch):
    monkeypatch.setattr(PassthroughMemory, "next_call", lambda self, tid: None)  # as if each were another thread's
    pin(on_card)
    assert waits == []

    on_card.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))
    assert waits == [hex(abi.request(abi.NV_ESC_RM_ALLOC_MEMORY, 56))]


@pytest.mark.parametrize("mapping", [cpu_mapping, uvm_mapping_of], ids=["CPU", "UVM"])
def test_a_call_for_memory_waits_for_mappings_in_progress(on_card, waits, monkeypatch, mapping):
    """The kernel reads the arguments of a mapping when it likes: they could name what the call makes."""
    on_card.limits = {}
    monkeypatch.setattr(InflightSyscalls, "remove", lambda self, tid: None)
    mapping(on_card)
    assert waits == []

    pin(on_card)
    assert len(waits) == 1


@pytest.mark.parametrize("mapping", [cpu_mapping, uvm_mapping_of], ids=["CPU", "UVM"])
def test_memory_by_address_is_freed_before_a_mapping(on_card, mapping):
    pin(on_card)
    on_card.rm.objects[7, 30] = (MEMORY_BY_ADDRESS, 2)
    mapping(on_card)

    assert (7, 30) not in on_card.rm.objects


@pytest.mark.parametrize("mapping", [cpu_mapping, uvm_mapping_of], ids=["CPU", "UVM"])
def test_kernel_maps_nothing_while_a_client_is_unseen(lost, monkeypatch, mapping):
    monkeypatch.setattr(passthrough_memory, "_ENDING_S", 0)
    assert mapping(lost) == errno.EBUSY
    assert lost.shared.refusals.counts["web", UNSEEN] == 1

    lost.rm._free(8, 8)
    assert mapping(lost) != errno.EBUSY


def test_a_client_with_an_unknown_device_is_not_clean(on_card, monkeypatch):
    monkeypatch.setattr(passthrough_memory, "_ENDING_S", 0)
    on_card.dispatcher._passthrough._may_have_device.add(7)
    pin(on_card)

    assert cpu_mapping(on_card) == errno.EBUSY


def test_a_successor_waits_for_what_its_predecessor_let_continue(on_card, waits, monkeypatch):
    request = abi.request(abi.NV_ESC_RM_ALLOC_MEMORY, 56)
    monkeypatch.setattr(thread_freezer, "threads_of", lambda *_: {os.getpid()})
    monkeypatch.setattr(proc, "syscall", lambda pid, tid: ["16", "0x3", hex(request), "0x0", "0x0", "0x0", "0x0"])
    on_card.dispatcher = on_card.dispatcher_of(on_card.shared, on_card.number)
    on_card.dispatcher.resume(None, None)

    on_card.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))
    assert waits == [hex(request)]
