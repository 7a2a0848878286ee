"""Calls that the kernel carries out for a pod: when is one certain to be over? With real threads in real calls."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from qgpu.guardian.proxy.seccomp_filter import install
from qgpu.linux.inflight_syscalls import InflightSyscall, InflightSyscalls
from qgpu.linux.seccomp_notify import SLOT_BYTES, Listener
from qgpu.nvidia import abi

REQUEST = abi.request(abi.NV_ESC_RM_CONTROL, 32)
#: The call's number on x86-64.
_IOCTL = 16


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
