"""Files on which pods make clients take the guardian's epoll watches: a pod has a share of them."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest

from qgpu.guardian.proxy import control_files
from qgpu.guardian.proxy.control_files import ControlFiles, mark_of
from qgpu.linux.open_file_set import FileSets
from qgpu.nvidia import abi
from tests.guardian.asked import alloc, alloc_status

PID = 77


class Clock:
    """A clock that moves by so much each time it is looked at."""

    now_ns, step_ns = 10**9, 0

    def __call__(self):
        self.now_ns += self.step_ns
        return self.now_ns


@pytest.fixture
def few(monkeypatch):
    """So few files that a pod has 6 of 20; one of 64 pods is guaranteed none."""
    monkeypatch.setattr(control_files, "_MOST", 20)
    monkeypatch.setattr(control_files, "_GUARANTEED", 0)


@pytest.fixture
def opened():
    """Open so many files."""
    fds = []

    def open_files(count):
        fds.extend(os.open("/dev/random", os.O_RDONLY) for _ in range(count))
        return fds[-count:]

    yield open_files
    for fd in fds:
        os.close(fd)


def claim(files, shares, pod, fds):
    """Claim files for a pod; tell for how many there was room."""
    room = [shares.has_room(pod) and files.makers.claim(fd, PID, mark_of(pod)) for fd in fds]
    return room.count(True)


def test_a_pod_has_a_share_of_the_files_and_others_have_theirs(few, opened):
    files = FileSets()
    shares = ControlFiles(lambda: files.makers, Clock())

    assert [claim(files, shares, pod, opened(20)) for pod in ("web", "other")] == [7, 5]


def test_files_that_were_closed_make_room(few, opened):
    files = FileSets()
    shares = ControlFiles(lambda: files.makers, Clock())
    for _ in range(3):
        fds = [os.open("/dev/random", os.O_RDONLY) for _ in range(5)]
        assert claim(files, shares, "web", fds) == 5
        for fd in fds:
            os.close(fd)


def test_a_new_guardian_knows_what_files_are_open(few, opened):
    files = FileSets()
    claim(files, ControlFiles(lambda: files.makers, Clock()), "web", opened(20))
    later = FileSets(files.fd)
    shares = ControlFiles(lambda: later.makers, Clock())

    assert (shares.has_room("web"), shares.has_room("other")) == (False, True)


def test_files_are_listed_for_a_small_part_of_the_time(few, opened, monkeypatch):
    files, clock, listed = FileSets(), Clock(), []
    clock.step_ns = 1_000
    monkeypatch.setattr(files.makers, "recount", lambda: listed.append(clock.now_ns))
    shares = ControlFiles(lambda: files.makers, clock)
    for fd in opened(7):
        files.makers.claim(fd, PID, mark_of("web"))
    for _ in range(200):
        shares.has_room("web")

    assert len(listed) > 1
    assert {later - before >= 20_000 for before, later in pairwise(listed)} == {True}


def test_a_small_host_keeps_half_of_its_watches(monkeypatch, tmp_path):
    (tmp_path / "watches").write_text(f"{2 * control_files.WATCHES * 10}\n")
    monkeypatch.setattr(control_files, "_MAX_USER_WATCHES", tmp_path / "watches")

    assert ControlFiles(lambda: FileSets().makers, Clock())._most == 10


def test_without_its_share_a_pod_makes_no_client(pod, monkeypatch):
    monkeypatch.setattr(pod.shared.control_files, "has_room", lambda name: name != "web")
    answer = pod.call(abi.NV_ESC_RM_ALLOC, alloc(0, 0, abi.NV01_ROOT, client=0))

    assert alloc_status(answer[2]) == abi.NV_ERR_INSUFFICIENT_RESOURCES
    assert pod.rm.seen == []
    assert pod.shared.refusals.counts["web", control_files.TOO_MANY] == 1
