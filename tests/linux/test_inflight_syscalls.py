"""Calls that the kernel carries out for a pod: when is one certain to be over? With real threads in real calls."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from qgpu.guardian.proxy.seccomp_filter import install
from qgpu.linux import proc
from qgpu.linux.inflight_syscalls import InflightSyscall, InflightSyscalls
from qgpu.linux.seccomp_notify import SLOT_BYTES, Listener
from qgpu.nvidia import abi
from tests.guardian.pod import until

REQUEST = abi.request(abi.NV_ESC_RM_CONTROL, 32)
#: The calls' numbers on x86-64.
_IOCTL, _FLOCK = 16, 73


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


@pytest.fixture
def blocked(tmp_path) -> Iterator[int]:
    """A process that waits in flock(2), whose second argument is LOCK_EX."""
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pid = os.fork()
        if pid == 0:
            fcntl.flock(os.open(tmp_path / "lock", os.O_RDWR), fcntl.LOCK_EX)
            os._exit(0)
        until(lambda: proc.syscall(pid, pid)[:1] == [str(_FLOCK)])
        yield pid
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_calls_in_progress_are_found_by_their_request(blocked):
    found, others = InflightSyscalls(), InflightSyscalls()
    found.find([blocked, os.getpid()], lambda request: request == fcntl.LOCK_EX)
    others.find([blocked], lambda request: request == fcntl.LOCK_SH)

    assert [call.tid for call in found.calls.values()] == [blocked]
    assert not found.wait(0.01)
    assert others.calls == {}
    os.kill(blocked, signal.SIGKILL)
    assert found.wait(60)


def test_a_stopped_thread_has_left_its_call(blocked):
    found = InflightSyscalls()
    found.find([blocked], lambda request: request == fcntl.LOCK_EX)
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
