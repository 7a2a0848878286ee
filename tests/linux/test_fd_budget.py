"""A guardian without a descriptor to spare: calls wait for one, and nothing wrong is concluded meanwhile."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.linux import fd_budget, proc
from qgpu.linux.inflight_syscalls import InflightSyscall
from qgpu.linux.open_file_set import FileSets, reserve_fds
from tests.guardian.pod import make_device, make_subdevice

#: Above the numbers of the sets of files.
_LOW = 1010


@contextmanager
def hungry() -> Iterator[Callable[[], None]]:
    """Leave this process no descriptor; yield what ends that."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    reserve_fds()
    resource.setrlimit(resource.RLIMIT_NOFILE, (_LOW, before[1]))
    taken: list[int] = []
    with suppress(OSError):
        while True:
            taken.append(os.dup(0))

    def feed() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

    try:
        yield feed
    finally:
        feed()
        for fd in taken:
            os.close(fd)


def test_a_call_waits_for_a_descriptor(pod):
    with hungry() as feed:
        threading.Timer(0.2, feed).start()
        make_device(pod)
    make_subdevice(pod)


def test_nobody_is_taken_for_gone_for_want_of_a_descriptor():
    here = os.getpid()
    with hungry():
        for look in (proc.maps, proc.stat, lambda pid: proc.status(pid, "Tgid"), lambda pid: list(proc.devices(pid))):
            with pytest.raises(OSError, match="Too many open files"):
                look(here)


def test_a_call_is_not_over_for_want_of_a_descriptor():
    with subprocess.Popen(["sleep", "600"]) as other:
        call = InflightSyscall(other.pid, other.pid, ["another"])
        with hungry():
            assert not call.wait(time.monotonic() + 0.01)
        assert call.wait(time.monotonic() + 60)
        other.kill()


def test_a_file_is_forgotten_without_a_descriptor():
    reading, writing = os.pipe()
    seen = FileSets().roots
    seen.add(reading)
    with hungry():
        seen.discard(reading)
    again = seen.add(reading)
    os.close(reading)

    assert again
    with pytest.raises(BrokenPipeError):  # nor is it kept open
        os.write(writing, b"x")
    os.close(writing)


@given(st.integers(0, 60), st.integers(1, 5), st.integers(64 * 5, 700))
def test_greedy_pods_leave_something_for_the_next(pods, guaranteed, most):
    own = [0] * pods
    grown = True
    while grown:
        grown = False
        for at in range(pods):
            if fd_budget.within_fair_share(own[at], most - sum(own), guaranteed):
                own[at] += 1
                grown = True

    assert _taken(most - sum(own), guaranteed) >= guaranteed


@given(st.integers(0, 60), st.integers(1, 5), st.integers(64 * 5, 700))
def test_pods_that_take_all_in_turn_leave_some_for_the_next(pods, guaranteed, most):
    left = most
    for _ in range(pods):
        left -= _taken(left, guaranteed)

    assert _taken(left, guaranteed) >= guaranteed


def _taken(left, guaranteed):
    """Return how many a new pod gets if it takes all it can."""
    own = 0
    while fd_budget.within_fair_share(own, left - own, guaranteed):
        own += 1
    return own


def test_long_held_fds_are_refused_early_and_leave_a_reserve():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(fd) for fd in os.listdir("/proc/self/fd")) + 400
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    taken: list[int] = []
    refused = None
    try:
        while refused is None:
            try:
                taken.append(fd_budget.check_headroom(os.dup(0)))
            except OSError as error:
                refused = error.errno
        taken += [os.dup(0) for _ in range(50)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in taken:
            os.close(fd)

    assert refused == errno.EAGAIN
