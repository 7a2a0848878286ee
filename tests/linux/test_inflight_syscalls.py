"""Calls that the kernel carries out for a pod: when is one certain to be over? With real threads in real calls."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from qgpu.guardian.proxy.seccomp_filter import install
from qgpu.linux import proc
from qgpu.linux.inflight_syscalls import InflightSyscall, InflightSyscalls
from qgpu.linux.seccomp_notify import SLOT_BYTES, Listener
from qgpu.linux.thread_freezer import leaves_kernel, run_as_tracer
from qgpu.nvidia import abi
from tests.guardian.pod import until

REQUEST = abi.request(abi.NV_ESC_RM_CONTROL, 32)
#: The calls' numbers on x86-64.
_IOCTL, _FLOCK = 16, 73
#: SECCOMP_IOCTL_NOTIF_RECV.
_RECV = 0xC0502100
#: In /proc/PID/stat from the state on: the time in the kernel.
_STIME_AT = 12


def _repeat(fd: int) -> None:
    """Make the same call for ever, each exactly as the one before, in the registers that it does not use too."""
    argument, libc = (ctypes.c_char * 32)(), ctypes.CDLL(None)
    words = [ctypes.c_long(word) for word in (_IOCTL, fd, REQUEST, ctypes.addressof(argument), 0, 0, 0)]
    while True:
        libc.syscall(*words)


@pytest.fixture
def repeating() -> Iterator[tuple[int, Listener]]:
    """A process that makes one call over and over, and its listener."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        socket.send_fds(theirs, [b"listener"], [install()])
        _repeat(os.open("/dev/null", os.O_RDWR))
    listener = Listener(socket.recv_fds(ours, 1, 1)[1][0], memoryview(bytearray(SLOT_BYTES)))
    yield pid, listener
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(listener.fd)


@contextmanager
def process(run: Callable[[], object], ready: Callable[[int], bool]) -> Iterator[int]:
    """Run something in a process of its own; yield its pid once it is ready."""
    if (pid := os.fork()) == 0:
        run()
        os._exit(0)
    until(lambda: ready(pid))
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def is_in(number: int) -> Callable[[int], bool]:
    """Tell of a process whether it waits in the call of this number."""
    return lambda pid: proc.syscall(pid, pid)[:1] == [str(number)]


@pytest.fixture
def blocked() -> Iterator[int]:
    """A process that waits in an ioctl: on a listener, for a call of its own."""
    with process(lambda: fcntl.ioctl(install(), _RECV, bytearray(_RECV >> 16 & 0x3FFF)), is_in(_IOCTL)) as pid:
        yield pid


@pytest.fixture
def locking(tmp_path) -> Iterator[int]:
    """A process that waits in flock(2), whose second argument is LOCK_EX."""
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        again = partial(os.open, tmp_path / "lock", os.O_RDWR)
        with process(lambda: fcntl.flock(again(), fcntl.LOCK_EX), is_in(_FLOCK)) as pid:
            yield pid


def _read_zeros() -> None:
    memory, zeros = mmap.mmap(-1, 1 << 26), os.open("/dev/zero", os.O_RDONLY)
    while True:
        os.readv(zeros, [memory] * 16)


@pytest.fixture
def reading() -> Iterator[int]:
    """A process that hardly leaves the kernel: it reads very much, over and over."""
    with process(_read_zeros, lambda pid: int(proc.stat(pid, pid)[_STIME_AT]) > 10) as pid:
        yield pid


def find(threads: list[int], wanted: int, stop: Callable[[InflightSyscall], bool] = leaves_kernel) -> InflightSyscalls:
    """Find calls with this request, as a successor does."""
    found = InflightSyscalls()
    run_as_tracer(lambda: found.find(threads, lambda request: request == wanted, stop))
    return found


def test_calls_in_progress_are_found_by_their_request(blocked):
    found = find([blocked, os.getpid()], _RECV)

    assert [call.tid for call in found.calls.values()] == [blocked]
    assert not found.wait(0.01)
    assert find([blocked], REQUEST).calls == {}
    os.kill(blocked, signal.SIGKILL)
    assert found.wait(60)


def test_other_system_calls_are_no_ioctls(locking):
    assert find([locking], fcntl.LOCK_EX).calls == {}


def test_search_ends_where_a_thread_stays_in_the_kernel(reading):
    assert find([reading], REQUEST).calls == {}


def test_threads_of_io_uring_are_neither_awaited_nor_stopped(monkeypatch):
    monkeypatch.setattr(proc, "stat", lambda pid, tid=None: ["R", *["0"] * 5, str(0x400050), *["0"] * 6])
    monkeypatch.setattr(proc, "syscall", lambda pid, tid: ["running"])

    assert find([os.getpid()], REQUEST, stop=lambda call: pytest.fail("it was stopped")).calls == {}


def test_a_stopped_thread_has_left_its_call(blocked):
    found = find([blocked], _RECV)
    assert not found.wait(0.01)

    os.kill(blocked, signal.SIGSTOP)
    assert found.wait(60)


@pytest.mark.skipif(not Path("/proc/self/wchan").exists(), reason="this kernel does not say where a thread waits")
def test_call_is_over_when_thread_is_in_next_identical_call(repeating):
    pid, listener = repeating
    call = listener.receive()
    pending = InflightSyscalls()
    pending.add(call, pid)
    listener.proceed(call.id)
    select.select([listener.fd], [], [], 60)  # it has come to the next

    same = InflightSyscall.of(call, pid).proc_syscall

    assert pending.wait(60)
    assert Path(f"/proc/{pid}/syscall").read_text().split()[: len(same)] == same
