"""Files that a process ties to a control file: they reach its clients, whoever made them."""

from __future__ import annotations

import errno
import os
import struct

import pytest

from qgpu.guardian.proxy import control_files
from qgpu.guardian.proxy.client_registry import OTHER_PROCESS
from qgpu.linux.open_file_set import FileSet, FileSets
from qgpu.nvidia import abi
from qgpu.nvidia.rm_client import take
from tests.guardian.asked import DEVICE_PARAMS, alloc, device
from tests.guardian.pod import CONTROL, CONTROL_MINOR, MINOR, device_of

ROOT = alloc(0, 0, abi.NV01_ROOT, client=0)
BY_KERNEL = (-1, errno.EINVAL)
ANOTHER_POD = 1


@pytest.fixture
def tied(pod, monkeypatch):
    """A pod whose files are judged as on a card; and what ties its device's file to a control file."""
    monkeypatch.setattr(abi, "NV_CONTROL_MINOR", CONTROL_MINOR)
    pod.shared.files = FileSets(pod.files.fd)
    number = pod.open(CONTROL)
    pidfd = os.pidfd_open(pod.process.pid)
    taken = take(pidfd, device_of(pod)), take(pidfd, number)
    yield pod, pod.shared.files, *taken, lambda: pod.call(abi.NV_ESC_REGISTER_FD, struct.pack("<i", number))[0]
    for fd in (pidfd, *taken):
        os.close(fd)


def test_both_files_are_of_the_process_that_ties_them(tied):
    pod, files, device_file, control_file, tie = tied

    assert tie() == 0
    assert all(files.makers.is_by(each, pod.process.pid) for each in (device_file, control_file))


def test_a_file_claimed_before_it_is_tied_is_nobodys(tied):
    pod, files, device_file, control_file, tie = tied
    pod.shared.note({"fact": "process", "pid": ANOTHER_POD, "pod": "web"})
    files.makers.claim(control_file, ANOTHER_POD, 0)
    pod.call(abi.NV_ESC_RM_ALLOC, ROOT)
    assert files.makers.is_by(device_file, pod.process.pid)

    assert tie() == 0
    assert not files.makers.is_by(device_file, pod.process.pid)
    assert not files.makers.claim(device_file, pod.process.pid, 0)


def test_another_pods_control_file_cannot_be_tied_to(tied):
    pod, files, device_file, control_file, tie = tied
    files.makers.claim(control_file, ANOTHER_POD, 0)
    pod.rm.seen.clear()

    assert (tie(), pod.rm.seen) == (-1, [])
    assert not any(files.tied.has(each) for each in (device_file, control_file))  # each takes one of few watches
    assert pod.shared.refusals.counts["web", OTHER_PROCESS] == 1


def test_a_pod_without_its_share_of_files_ties_none(tied, monkeypatch):
    pod, files, device_file, control_file, tie = tied
    monkeypatch.setattr(pod.shared.control_files, "has_room", lambda name: name != "web")
    pod.rm.seen.clear()

    assert (tie(), pod.rm.seen) == (-1, [])
    assert pod.shared.refusals.counts["web", control_files.TOO_MANY] == 1
    assert not any(files.tied.has(each) for each in (device_file, control_file))


def test_a_tied_file_keeps_its_maker_without_clients(tied):
    _, files, _, control_file, tie = tied
    tie()
    files.forget_root(control_file)

    assert not files.makers.claim(control_file, ANOTHER_POD, 0)


def test_a_file_of_another_kind_enters_no_set(pod, monkeypatch):
    """It may not return from its poll, as one of a FUSE server of the pod's."""
    asked = []
    monkeypatch.setattr(FileSet, "_control", lambda *what: asked.append(what))
    pod.call(abi.NV_ESC_REGISTER_FD, struct.pack("<i", pod.open("/dev/null")))

    assert asked == []


def test_a_tied_control_file_makes_nobody_else_a_maker(pod, monkeypatch):
    monkeypatch.setattr(abi, "NV_CONTROL_MINOR", MINOR)
    pod.profiling = True
    pod.shared.files = FileSets(pod.files.fd)
    assert pod.call(abi.NV_ESC_RM_ALLOC, ROOT)[:2] == BY_KERNEL  # RM's client 7
    pod.tell("fork")
    other = int(pod.child.said())
    pod.tell("reopen")
    pod.child.said()

    assert pod.call(abi.NV_ESC_REGISTER_FD, struct.pack("<i", 300))[0] == -1
    pod.call(abi.NV_ESC_RM_ALLOC, device(), DEVICE_PARAMS)
    assert [entry for entry in pod.shared.table.clients.values() if entry.maker == other] == []
