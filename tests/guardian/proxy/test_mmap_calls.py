"""Managed memory: mappings that could be UVM's must fit, and UVM is set up so that there is no other way to it."""

from __future__ import annotations

import errno
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time

import pytest

from qgpu.guardian.accounting import managed_memory
from qgpu.guardian.proxy.mmap_calls import MmapHandler
from qgpu.guardian.proxy.seccomp_filter import install
from qgpu.nvidia import abi, uvm
from tests.guardian.asked import control
from tests.guardian.failover.test_successors import successor_of
from tests.guardian.pod import allocate, held

SMALL, LARGE = 1 << 20, 1 << 29


@pytest.fixture
def mapping(on_card, monkeypatch):
    """A pod with room for a small mapping; what its first process maps of UVM is what ``mapped`` says."""
    on_card.limits[0] = LARGE // 2
    on_card.mapped = 0
    on_card.of_uvm = True
    monkeypatch.setattr(managed_memory, "mapped", lambda pid: on_card.mapped if pid == on_card.process.pid else 0)
    monkeypatch.setattr(MmapHandler, "_is_uvm", lambda self, pid, fd: on_card.of_uvm)

    def map_(size, offset=4096):
        on_card.tell(f"mapfile {size} {offset}")
        return on_card.answer()[:2]

    on_card.map = map_
    return on_card


def test_what_could_be_managed_memory_must_fit(mapping):
    mapping.shared.quota.will_use_uvm(mapping.process.pid)

    mapping.of_uvm = False
    assert mapping.map(LARGE) == (-1, errno.ENOMEM)
    assert mapping.map(SMALL) == (0, 0)
    assert mapping.shared.refusals.counts["web", "managed memory over the limit"] == 1


def test_mapping_is_in_flight_before_process_uses_uvm(mapping):
    """It could become managed memory by the time that a card is registered."""
    mapping.map(SMALL)

    assert len(mapping.dispatcher._mmap._making.calls) == 1


def test_managed_mapping_over_limit_refused_next_fit_succeeds(mapping):
    mapping.shared.quota.will_use_uvm(mapping.process.pid)
    answers = []
    for size in (LARGE, SMALL):
        mapping.tell(f"mapfixed {size} {0x204A00000}")
        answers.append(mapping.answer()[:2])

    assert answers[0] == (-1, errno.EPERM)
    assert answers[1][0] == 0


def test_uvm_set_up_by_vm_sharer_is_charged_at_registration(mapping):
    """The other shares its memory (clone(CLONE_VM)), and is gone when the first mapping is made."""
    unseen = mapping.map(SMALL), held(mapping)
    mapping.mapped = SMALL
    mapping.uvm(uvm.REGISTER_GPU, bytes(40))
    seen = held(mapping)
    late = mapping.map(LARGE)
    mapping.mapped = LARGE
    mapping.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))
    mapping.shared.quota.rescan_mappings(mapping.process.pid)
    full = mapping.uvm(uvm.REGISTER_GPU, bytes(40))

    assert (unseen, seen, late) == (((0, 0), 0), SMALL, (-1, errno.EPERM))
    assert struct.unpack_from("<I", full[2], 36)[0] == abi.NV_ERR_NO_MEMORY


def test_managed_memory_and_other_memory_are_one_limit(mapping):
    mapping.shared.quota.will_use_uvm(mapping.process.pid)
    mapping.map(SMALL)
    mapping.mapped = LARGE // 2
    full = allocate(mapping, 10, SMALL)
    mapping.mapped = 0  # it has been unmapped

    assert full == abi.NV_ERR_NO_MEMORY
    assert allocate(mapping, 10, SMALL) == abi.NV_OK


@pytest.fixture
def other(mapping):
    """Another process of the pod."""
    process = subprocess.Popen(["sleep", "60"])
    mapping.shared.clients.register_process("web", process.pid)
    yield process.pid
    process.kill()
    process.wait()


def test_mapping_counts_when_another_process_uses_uvm(mapping, other):
    """That may have shared the caller's memory before it executed another program; nobody can tell."""
    mapping.shared.quota.will_use_uvm(other)
    refused = mapping.map(LARGE)
    mapping.map(SMALL)
    mapping.mapped = SMALL
    mapping.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))
    mapping.shared.quota.search.clear("web")

    assert (refused, held(mapping)) == ((-1, errno.EPERM), SMALL)


def test_earlier_mappings_count_when_another_registers_a_card(mapping, other):
    """It has a file that a process which shared the caller's memory has initialised, and that one has ended."""
    mapping.map(SMALL)
    mapping.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))
    mapping.mapped = SMALL
    unseen = held(mapping)
    mapping.shared.quota.start_using_uvm("web", other)
    mapping.dispatcher._mmap.charge_made()

    assert (unseen, held(mapping)) == (0, SMALL)


def test_process_that_does_not_show_mappings_delays_a_card(mapping):
    mapping.map(SMALL)
    mapping.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))
    mapping.mapped = None
    answer = mapping.uvm(uvm.REGISTER_GPU, bytes(40))
    mapping.mapped = SMALL
    again = mapping.uvm(uvm.REGISTER_GPU, bytes(40))

    said = [struct.unpack_from("<I", each[2], 36)[0] for each in (answer, again)]
    assert (said, held(mapping)) == ([abi.NV_ERR_BUSY_RETRY, abi.NV_OK], SMALL)


def test_mappings_before_a_successor_count_when_it_serves(mapping):
    """The dead guardian let them pass, because nobody used UVM."""
    mapping.map(SMALL)
    mapping.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))
    mapping.mapped = SMALL
    unseen = held(mapping)
    successor_of(mapping)

    assert (unseen, held(mapping)) == (0, SMALL)


def test_mapping_counts_while_a_dead_registrars_file_is_full(mapping):
    """The pod's thread that empties it may have much to do."""
    file = os.open("/dev/random", os.O_RDONLY)
    mapping.shared.uvm_files.hold("web", 5, 9, file, [bytes(16)])
    os.close(file)
    files = mapping.shared.uvm_files.take(5)
    during = mapping.map(LARGE)
    mapping.shared.uvm_files.release(files)

    assert (during, mapping.map(LARGE)) == ((-1, errno.EPERM), (0, 0))


def test_processes_that_ended_are_not_looked_at_for_mappings(mapping, monkeypatch):
    mapping.map(SMALL)
    mapping.shared.exited(mapping.process.pid)
    monkeypatch.setattr(managed_memory, "mapped", lambda pid: pytest.fail("looked at it"))

    assert mapping.dispatcher._mmap.charge_unseen()


def test_charge_of_a_process_that_shows_no_mappings_stays(mapping):
    pid = mapping.process.pid
    mapping.shared.quota.will_use_uvm(pid)
    mapping.mapped = LARGE // 4
    mapping.shared.quota.rescan_mappings(pid)
    mapping.mapped = None
    mapping.shared.quota.rescan_mappings(pid)

    assert held(mapping) == LARGE // 4


def test_mapping_that_is_not_managed_memory_is_not_charged(mapping):
    mapping.shared.quota.will_use_uvm(mapping.process.pid)
    mapping.map(SMALL)
    during = held(mapping)
    mapping.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))
    mapping.shared.quota.search.clear("web")

    assert (during, held(mapping)) == (managed_memory.cost_of(None, SMALL), 0)


def test_programs_without_cuda_map_what_they_like(mapping):
    assert mapping.map(LARGE) == (0, 0)


def test_mapping_of_any_descriptor_may_be_uvms_when_made(mapping):
    """A process made with CLONE_FILES is no thread, and can put another file in the descriptor's place."""
    mapping.shared.quota.will_use_uvm(mapping.process.pid)
    mapping.of_uvm = False

    assert mapping.map(LARGE) == (-1, errno.ENOMEM)


@pytest.mark.parametrize("limited", [True, False])
def test_uvm_is_initialised_without_hmm_under_a_limit(on_card, limited):
    if not limited:
        on_card.limits.clear()
    answer = on_card.uvm(uvm.INITIALIZE, bytes(16))

    assert answer[2][:8] == struct.pack("<Q", uvm.INIT_FLAGS_DISABLE_HMM if limited else 0)


@pytest.mark.parametrize("said", [abi.NV_OK, abi.NV_ERR_INVALID_ARGUMENT])
def test_a_file_initialised_in_another_way_gets_no_card(on_card, said):
    on_card.rm.answers["initialised"] = said
    answer = on_card.uvm(uvm.REGISTER_GPU, bytes(40))

    registered = struct.unpack_from("<I", answer[2], 36)[0]
    assert registered == (abi.NV_OK if said == abi.NV_OK else abi.NV_ERR_INVALID_STATE)


def test_uvm_gets_no_card_without_a_grant(on_card):
    on_card.shared.uuids = {}
    answer = on_card.uvm(uvm.REGISTER_GPU, bytes(40))

    assert struct.unpack_from("<I", answer[2], 36)[0] == abi.NV_ERR_INSUFFICIENT_PERMISSIONS


def test_uvm_gets_no_card_beside_a_mapping_in_the_making(on_card):
    """That could become managed memory which nothing was charged for."""
    on_card.dispatcher._mmap.charge_made = lambda: False
    answer = on_card.uvm(uvm.REGISTER_GPU, bytes(40))

    assert struct.unpack_from("<I", answer[2], 36)[0] == abi.NV_ERR_BUSY_RETRY
    assert on_card.shared.uvm_files.has_none(on_card.process.pid)


@pytest.mark.parametrize(("limits", "answer"), [({0: LARGE}, errno.EOPNOTSUPP), ({}, errno.EINVAL)])
def test_uvm_p2p_memory_is_refused_under_a_limit(on_card, limits, answer):
    on_card.limits.clear()
    on_card.limits.update(limits)

    assert on_card.uvm(uvm.ALLOC_DEVICE_P2P, bytes(64))[:2] == (-1, answer)  # the other one is the kernel's


@pytest.mark.parametrize("limited", [True, False])
def test_uvms_file_is_held_from_the_first_card_on_under_a_limit(on_card, limited):
    if not limited:
        on_card.limits.clear()
    on_card.uvm(uvm.REGISTER_GPU, bytes(40))
    files = on_card.shared.uvm_files.take(on_card.process.pid)
    on_card.shared.uvm_files.release(files)

    assert [file.cards for file in files] == ([{bytes(16)}] if limited else [])


def _map_for_ever(theirs):
    """Map a file as UVM's could be mapped, and compute for a while, over and over, behind a listener of its own."""
    socket.send_fds(theirs, [b"listener"], [install()])
    file = os.memfd_create("mapped")
    os.truncate(file, 2 * SMALL)
    while True:
        mmap.mmap(file, mmap.PAGESIZE, offset=mmap.PAGESIZE).close()
        until = time.perf_counter() + 0.0003
        while time.perf_counter() < until:
            pass


def _serve(pod, fd, is_over):
    number = pod.shared.listeners.add("web", fd)
    listener = pod.shared.listeners[number][1]
    while not is_over.is_set():
        if select.select([fd], [], [], 0.1)[0] and (call := listener.receive()) is not None:
            pod.dispatcher.serve(listener, call)


def test_listeners_of_one_pod_do_not_wait_for_each_other(on_card):
    """One has a computing thread stopped to look at its last mapping, while the other has received its next."""
    on_card.limits[0] = SMALL
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        _map_for_ever(theirs)
    over = threading.Event()
    threads = [
        threading.Thread(target=_serve, args=(on_card, socket.recv_fds(ours, 1, 1)[1][0], over), daemon=True),
        threading.Thread(target=lambda: [allocate(on_card, 200 + n, LARGE) for n in range(300)], daemon=True),
    ]
    for thread in threads:
        thread.start()
    threads[1].join(60)
    over.set()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

    assert not threads[1].is_alive()
