"""Files on which UVM records events: UVM goes through all of them, under a lock that others' faults need."""

from __future__ import annotations

import errno

import pytest

from qgpu.guardian.proxy import control_files, uvm_calls
from qgpu.guardian.proxy.control_files import ControlFiles, mark_of
from qgpu.linux.open_file_set import FileMakers
from qgpu.nvidia import uvm
from tests.guardian.pod import MAJOR

#: What the device answers that stands for UVM's, when the kernel performs the call.
THERE = errno.EINVAL


@pytest.fixture
def few(pod, monkeypatch):
    """A pod that may have one such file; files are listed as often as it asks."""
    monkeypatch.setattr(uvm_calls, "_MOST_RECORDERS", 1)
    monkeypatch.setattr(control_files, "_PARTS", 0)
    return pod


def reopen(pod):
    """Let the pod open the device anew; it keeps the last file, but not the one before that."""
    pod.tell("reopen")
    pod.child.said()


def record(pod, request=56):
    """Have UVM record on the pod's file; return the errno."""
    return pod.uvm(request, bytes(64))[1]


@pytest.mark.parametrize("request_", sorted(uvm.TRACKERS))
@pytest.mark.parametrize("limited", [True, False])
def test_files_on_which_uvm_records_are_bounded(few, request_, limited):
    if not limited:
        few.limits.clear()
    answers = [record(few, request_)]
    reopen(few)
    answers.append(record(few, request_))
    reopen(few)
    answers.append(record(few, request_))

    assert answers == [THERE, errno.ENOSPC, THERE]
    assert few.shared.refusals.counts["web", uvm_calls.TOO_MANY_RECORDERS] == 1


def test_a_successor_counts_the_files_of_the_dead_guardian(few):
    record(few)
    reopen(few)
    makers = FileMakers(few.files.fd)
    few.shared.control_files = ControlFiles(lambda: makers, few.shared.clock)

    assert record(few) == errno.ENOSPC


def test_files_of_records_are_no_control_files(few):
    record(few)

    assert (few.files.makers.count(), few.files.makers.count(mark_of("web"))) == (1, 0)


def test_uvm_records_on_no_file_of_a_threads_own_table(few):
    """The guardian counts the file in the process's table; that one would be counted for nobody."""
    few.shared.major, few.shared.uvm_major = None, MAJOR
    few.tell(f"own_table 56 {bytes(64).hex()}")

    assert few.answer()[1] == errno.EPERM
    assert few.shared.refusals.counts["web", "call while other threads run"] == 1
