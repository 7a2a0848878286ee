"""Managed memory in a memory map that its process has left: a file of UVM's can keep the map without a process."""

from __future__ import annotations

import errno
import os
import platform
import signal
import struct
import subprocess

import pytest

from qgpu.guardian.accounting import managed_memory
from qgpu.guardian.proxy import held_uvm_files, uvm_calls
from qgpu.guardian.proxy.held_uvm_files import MOST
from qgpu.guardian.proxy.pod_uvm_files import PodUvmFiles
from qgpu.linux import proc
from qgpu.nvidia import abi, uvm
from tests.guardian.failover.test_successors import successor_of
from tests.guardian.pod import MAJOR, held, until

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="processes that run its machine code")

SIZE, ADDRESS = 64 << 20, 0x204A00000
COST = managed_memory.cost_of(ADDRESS, SIZE)


@pytest.fixture
def left(on_card):
    """A pod whose process maps managed memory, and has executed another program; ``end_map`` ends the first map.

    A process that is in no pod stands for the file of UVM's that keeps the map.
    """
    pid = on_card.process.pid
    on_card.uvm(uvm.REGISTER_GPU, bytes(40))
    on_card.tell(f"mapfixed {SIZE} {ADDRESS}")
    assert on_card.answer()[0] == 0
    on_card.tell("vmsilent")
    keeper = on_card.answer()[0]
    on_card.tell("exec")
    until(lambda: proc.name(pid) == "sleep")

    def end_map():
        os.kill(keeper, signal.SIGKILL)
        until(lambda: not managed_memory.mapped(keeper))

    on_card.end_map = end_map
    yield on_card
    end_map()


def look(pod):
    """Look at what the pod's processes map."""
    pod.dispatcher._ctx.rescan_mappings()


def test_a_map_that_its_process_has_left_stays_charged(left):
    look(left)

    assert managed_memory.mapped(left.process.pid) == 0
    assert held(left) == COST


def test_a_map_that_nobody_keeps_is_discharged(left):
    look(left)
    left.end_map()
    look(left)

    assert held(left) == 0


def test_a_map_counts_until_its_file_is_emptied(left):
    (closed,) = left.shared.uvm_files.take_closed([left.process.pid]).values()
    before = left.shared.uvm_files.mapped(left.process.pid)
    left.shared.uvm_files.release(closed)

    assert (before, left.shared.uvm_files.mapped(left.process.pid)) == (COST, 0)
    assert closed[0].maps is None


def register(pod):
    """Register a card, without the call before that initialises the file; return UVM's status."""
    pod.shared.major, pod.shared.uvm_major = None, MAJOR
    pod.child.ask(uvm.REGISTER_GPU, bytes(40))
    answer = pod.answer()[2]
    pod.shared.major, pod.shared.uvm_major = MAJOR, None
    return struct.unpack_from("<I", answer, 36)[0]


def test_no_card_is_registered_in_a_file_of_unknown_map(on_card):
    assert register(on_card) == abi.NV_ERR_INVALID_STATE
    assert on_card.shared.refusals.counts["web", uvm_calls.OTHERS_FILE] == 1
    on_card.uvm(uvm.INITIALIZE, bytes(16))
    assert register(on_card) == abi.NV_OK


def test_a_successor_registers_cards_in_files_of_before(on_card, monkeypatch):
    on_card.uvm(uvm.INITIALIZE, bytes(16))
    monkeypatch.setattr(PodUvmFiles, "major", lambda *_: MAJOR)
    successor_of(on_card)

    assert register(on_card) == abi.NV_OK


def reopen(pod):
    pod.tell("reopen")
    pod.child.said()


def test_files_that_are_initialised_are_bounded(on_card, monkeypatch):
    monkeypatch.setattr(held_uvm_files, "MOST", 1)
    first = on_card.uvm(uvm.INITIALIZE, bytes(16))[1]
    reopen(on_card)
    result, _, argument = on_card.uvm(uvm.INITIALIZE, bytes(16))

    assert first == errno.EINVAL  # as the device answers that stands for UVM's
    assert (result, struct.unpack_from("<I", argument, 8)[0]) == (0, abi.NV_ERR_INSUFFICIENT_RESOURCES)
    assert on_card.shared.refusals.counts["web", uvm_calls.TOO_MANY_FILES] == 1


def test_initialised_files_that_are_closed_make_room(on_card, monkeypatch):
    files, pid = on_card.shared.uvm_files, on_card.process.pid
    monkeypatch.setattr(held_uvm_files, "_has", lambda pid, held: False)
    for _ in range(2 * MOST):
        assert on_card.uvm(uvm.INITIALIZE, bytes(16))[1] == errno.EINVAL
        reopen(on_card)

    assert (len(files._of(pid)), files._open_of.total()) == (1, 1)
    assert len(on_card.shared.table.uvm_fds.of(pid)) == 1


def test_a_process_that_ends_leaves_no_initialised_file(on_card):
    on_card.uvm(uvm.INITIALIZE, bytes(16))
    files, pid = on_card.shared.uvm_files, on_card.process.pid
    files.release(files.take(pid))

    assert (files._of(pid), files._open_of.total(), files._new) == ([], 0, {})


def test_no_file_is_initialised_whose_map_cannot_be_seen(on_card, monkeypatch):
    monkeypatch.setattr(held_uvm_files, "_maps_of", lambda pid, tid: None)
    argument = on_card.uvm(uvm.INITIALIZE, bytes(16))[2]

    assert struct.unpack_from("<I", argument, 8)[0] == abi.NV_ERR_INSUFFICIENT_RESOURCES
    assert on_card.shared.uvm_files._open_of.total() == 0


def test_a_map_whose_thread_has_ended_counts_as_it_was(on_card, monkeypatch):
    """The kernel shows a memory map only as long as the thread lives by which it was opened."""
    on_card.uvm(uvm.REGISTER_GPU, bytes(40))
    (file,) = on_card.shared.uvm_files._of(on_card.process.pid)
    shown = iter([COST, 0])
    ended = subprocess.Popen(["sleep", "60"])
    os.dup2(os.open(f"/proc/{ended.pid}/maps", os.O_RDONLY), file.maps)
    ended.kill()
    ended.wait()
    monkeypatch.setattr(managed_memory, "mapped", lambda pid: next(shown))

    assert [file.mapped(), file.mapped()] == [COST, COST]
