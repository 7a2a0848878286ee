"""UVM's files are emptied when their process has ended or closed them, whoever else may have them."""

from __future__ import annotations

import os
import subprocess

import pytest

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.proxy import held_uvm_files
from qgpu.guardian.proxy.held_uvm_files import MOST, UvmFiles
from qgpu.nvidia import abi, uvm

CARD, OTHER = b"\x01" * 16, b"\x02" * 16


@pytest.fixture
def files():
    asked = []

    def perform(fd, request, argument):
        os.fstat(fd)
        asked.append((request, bytes(abi.ffi.buffer(argument)[:16])))
        return 0

    return UvmFiles(perform), asked


def opened():
    return os.open("/dev/null", os.O_RDWR)


def test_release_unregisters_every_card_and_closes_the_file(files):
    held, asked = files
    fd = opened()
    held.hold("web", os.getpid(), fd, fd, [CARD])
    held.hold("web", os.getpid(), fd, fd, [OTHER])
    (file,) = held.take(os.getpid())
    held.release([file])

    assert sorted(asked) == [(uvm.UNREGISTER_GPU, CARD), (uvm.UNREGISTER_GPU, OTHER)]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(file.ours)
    assert held.take(os.getpid()) == []
    os.close(fd)


@pytest.fixture
def process():
    """Start a process that has, as its stdin, what it is given."""
    started = []

    def start(stdin):
        started.append(subprocess.Popen(["sleep", "60"], stdin=stdin))
        return started[-1].pid

    yield start
    for each in started:
        each.kill()
        each.wait()


def test_file_open_under_another_fd_number_is_not_closed(files, process):
    held, _ = files
    fd = opened()
    pid = process(fd)
    held.hold("web", pid, 77, fd, [CARD])
    os.close(fd)

    assert held.take_closed([pid]) == {}


def test_file_closed_by_its_process_is_released(files, process):
    held, asked = files
    fd, pid = opened(), process(subprocess.DEVNULL)
    held.hold("web", pid, 77, fd, [CARD])
    os.close(fd)
    closed = held.take_closed([pid])
    held.release(closed[pid])

    assert asked == [(uvm.UNREGISTER_GPU, CARD)]
    assert held.has_none(pid)


def test_a_process_has_so_many_files_and_no_more(files):
    held, _ = files
    fds = [opened() for _ in range(MOST + 1)]

    assert [held.hold("web", os.getpid(), fd, fd, [CARD]) for fd in fds] == [*fds[:-1], None]
    held.release(held.take(os.getpid()))
    for fd in fds:
        os.close(fd)


def test_numbers_of_files_that_are_closed_are_forgotten(pod, monkeypatch):
    """One file stays, others come and go under ever new numbers."""
    shared, pid = pod.shared, os.getpid()
    shared.clients.register_process("web", pid)
    stay, *others = (os.open("/dev/random", os.O_RDONLY) for _ in range(30))
    monkeypatch.setattr(held_uvm_files, "_has", lambda pid, held: held.theirs == stay)
    shared.pod_uvm_files.hold(pid, stay, stay)
    for fd in others:
        shared.pod_uvm_files.release_closed("web")
        assert shared.pod_uvm_files.hold(pid, fd, fd)
        os.close(fd)
    shared.pod_uvm_files.release_closed("web")
    os.close(stay)

    assert shared.table.uvm_fds == {pid: {stay}}
    assert shared.uvm_files._counts.total() == 1


def test_a_file_with_many_descriptors_is_recorded_once(pod):
    """A successor takes each recorded descriptor before it serves."""
    shared, pid = pod.shared, os.getpid()
    shared.clients.register_process("web", pid)
    fds = [os.open("/dev/random", os.O_RDONLY)]
    fds += [os.dup(fds[0]) for _ in range(30)]
    kept = [shared.pod_uvm_files.hold(pid, fd, fd) for fd in fds]
    for fd in fds:
        os.close(fd)

    assert all(kept)
    assert shared.table.uvm_fds == {pid: {fds[0]}}


def test_file_registered_again_before_release_is_noted_stays(pod, monkeypatch):
    """The main loop notes a release later. A successor holds what the journal says is there."""
    shared, pid = pod.shared, os.getpid()
    shared.clients.register_process("web", pid)
    fd = os.open("/dev/random", os.O_RDONLY)
    shared.pod_uvm_files.hold(pid, fd, fd)
    with monkeypatch.context() as patch:
        patch.setattr(held_uvm_files, "_has", lambda pid, held: False)
        (files,) = shared.uvm_files.take_closed([pid]).values()
    shared.uvm_files.release(files)
    shared.pod_uvm_files.hold(pid, fd, fd)
    shared.pod_uvm_files.released(pid, files)
    again = ObjectTable()
    for fact in Journal(os.dup(shared.journal.fd)).read()[1]:
        again.note(fact)
    os.close(fd)

    assert shared.table.uvm_fds == again.uvm_fds == {pid: {fd}}


def test_file_counts_until_its_cards_are_unregistered(files):
    held, _ = files
    fd = opened()
    held.hold("web", 5, fd, fd, [CARD])
    taken = held.take(5)
    during = held.count("web"), held.has_none(5), held.has_at(5, fd)
    held.release(taken)
    os.close(fd)

    assert during == (1, False, True)
    assert (held.count("web"), held.has_none(5), held.has_at(5, fd)) == (0, True, False)


def test_a_file_of_a_process_that_ends_meanwhile_is_let_go(pod, monkeypatch):
    shared, pid = pod.shared, pod.process.pid
    shared.clients.register_process("web", pid)
    keep = shared.uvm_files.hold

    def late(*arguments):
        kept = keep(*arguments)
        shared.exited(pid)
        return kept

    file = os.open("/dev/random", os.O_RDONLY)
    monkeypatch.setattr(UvmFiles, "hold", lambda _, *arguments: late(*arguments))
    kept = shared.pod_uvm_files.hold(pid, file, file)
    os.close(file)

    assert (kept, shared.uvm_files._counts.total()) == (False, 0)
