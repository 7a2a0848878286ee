"""Calls that the kernel carries out for a pod: when is one certain to be over? With real threads in real calls."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from qgpu.guardian.proxy.seccomp_filter import install
from qgpu.linux import proc, thread_freezer
from qgpu.linux.inflight_syscalls import InflightSyscall, InflightSyscalls
from qgpu.linux.seccomp_notify import RECEIVED, SLOT_BYTES, Listener, Notification
from qgpu.nvidia import abi
from tests.guardian.pod import until

REQUEST = abi.request(abi.NV_ESC_RM_CONTROL, 32)
#: The calls' numbers on x86-64.
_IOCTL, _FLOCK = 16, 73
#: SECCOMP_IOCTL_NOTIF_RECV.
_RECV = 0xC0502100
#: In /proc/PID/stat from the state on: the time in the kernel.
_STIME_AT = 12


def _call(tid: int) -> Notification:
    return Notification(0, tid, 0, _IOCTL, (0, REQUEST, 0, 0, 0, 0))


def _repeat(fd: int) -> None:
    """Make the same call for ever, each exactly as the one before, in the registers that it does not use too."""
    argument, libc = (ctypes.c_char * 32)(), ctypes.CDLL(None)
    words = [ctypes.c_long(word) for word in (_IOCTL, fd, REQUEST, ctypes.addressof(argument), 0, 0, 0)]
    while True:
        libc.syscall(*words)


@contextmanager
def repeats() -> Iterator[tuple[int, Listener]]:
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
def repeating() -> Iterator[tuple[int, Listener]]:
    """A process that makes one call over and over, and its listener."""
    with repeats() as made:
        yield made


@contextmanager
def process(run: Callable[[], object], ready: Callable[[int], bool]) -> Iterator[int]:
    """Run something in a process of its own; yield its pid once it is ready."""
    if (pid := os.fork()) == 0:
        run()
        os._exit(0)
    until(lambda: ready(pid))
    yield pid
    with suppress(ProcessLookupError, ChildProcessError):  # whoever stopped it may have been told of its end
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


def received(listener: Listener) -> Notification:
    """Receive a call; one whose thread was interrupted meanwhile comes again."""
    while (call := listener.receive()) is None:
        pass
    return call


def continue_until_next(pid: int, listener: Listener, pending: InflightSyscalls) -> Notification:
    """Let a call of a process continue that repeats it, and wait until the process waits in the next; return the first.

    Before that it runs, or waits for a CPU: whoever stops it then sees that the first is over.
    """
    pending.add(call := received(listener), pid)
    listener.proceed(call.id)
    assert select.select([listener.fd], [], [], 60)[0]
    until(lambda: proc.stat(pid, pid)[:1] == ["S"])
    return call


def find(threads: list[int], wanted: int) -> InflightSyscalls:
    """Find calls with this request, as a successor does."""
    found = InflightSyscalls()
    found.find(threads, lambda request: request == wanted)
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
    monkeypatch.setattr(thread_freezer, "leaves_kernel", lambda *_: pytest.fail("it was stopped"))

    assert find([os.getpid()], REQUEST).calls == {}


@pytest.mark.parametrize("outside", [True, False])
def test_a_running_thread_is_stopped_to_see_if_its_call_is_over(monkeypatch, outside):
    monkeypatch.setattr(proc, "syscall", lambda pid, tid: ["running"])
    monkeypatch.setattr(thread_freezer, "leaves_kernel", lambda *_: outside)

    deadline = time.monotonic() + (60 if outside else 0.1)
    assert InflightSyscall(os.getpid(), os.getpid(), ["16"]).wait(deadline) == outside


def test_a_call_is_not_over_while_no_thread_can_be_started(reading, monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)

    assert not InflightSyscall(reading, reading, ["19"]).wait(time.monotonic() + 0.1)


def test_a_thread_whose_next_call_was_received_has_left_the_last(repeating, monkeypatch):
    pid, listener = repeating
    continue_until_next(pid, listener, pending := InflightSyscalls())
    monkeypatch.setattr(proc, "wchan", lambda pid, tid: "elsewhere")
    assert not pending.wait(0.1)

    received(listener)
    assert pending.wait(60)


def test_thread_stays_received_if_an_ended_one_had_its_number(repeating):
    """Else its last call counts as in progress, and whoever waits for that does not answer this one."""
    pid, listener = repeating
    with repeats() as (_, other):
        other._notif.pid = pid  # of the thread whose call was answered last
        received(listener)
        received(other)

        assert pid in RECEIVED


def test_a_thread_of_a_frozen_cgroup_has_left_its_call(blocked, monkeypatch):
    found = find([blocked], _RECV)
    assert not found.wait(0.01)

    monkeypatch.setattr(proc, "wchan", lambda pid, tid: "do_freezer_trap")
    assert found.wait(60)


def test_of_many_calls_those_that_are_done_are_returned(monkeypatch):
    """A call of a thread that ended is returned with its size, and one in progress stays."""
    calls, ended, begun = InflightSyscalls(), range(1, 200, 2), range(2, 200, 2)
    monkeypatch.setattr(InflightSyscall, "has_left", lambda call: call.tid in ended)
    done = [over for tid in sorted([*ended, *begun]) for over in calls.add(_call(tid), tid, size=tid)]
    for again in range(400):
        done += calls.add(_call(again % 2 + 1000), 1)

    assert sorted((over.tid, over.size) for over in done if over.tid < 1000) == [(tid, tid) for tid in ended]
    assert set(begun) <= calls.calls.keys()


def test_a_stopped_thread_has_left_its_call(blocked):
    found = find([blocked], _RECV)
    assert not found.wait(0.01)

    os.kill(blocked, signal.SIGSTOP)
    assert found.wait(60)


@pytest.mark.skipif(not Path("/proc/self/wchan").exists(), reason="this kernel does not say where a thread waits")
def test_call_is_over_when_thread_is_in_next_identical_call(repeating):
    pid, listener = repeating
    call = continue_until_next(pid, listener, pending := InflightSyscalls())

    same = InflightSyscall.of(call, pid).proc_syscall

    assert pending.wait(60)
    assert Path(f"/proc/{pid}/syscall").read_text().split()[: len(same)] == same


def test_waiting_thread_is_stopped_if_the_kernel_cannot_tell(repeating, monkeypatch):
    monkeypatch.setattr(proc, "wchan", lambda pid, tid: "0")
    pid, listener = repeating
    call = continue_until_next(pid, listener, pending := InflightSyscalls())

    assert pending.wait(60)
    assert received(listener).arguments == call.arguments


def test_a_waiting_thread_is_left_alone_if_no_call_waits(blocked, repeating, monkeypatch):
    monkeypatch.setattr(proc, "wchan", lambda pid, tid: "0")
    received(repeating[1])
    (call,) = find([blocked], _RECV).calls.values()

    assert call.has_left() is False


#: A program whose first thread ends, and another one goes on.
_FIRST_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(60, 0)
"""


def test_a_first_thread_that_ended_before_the_others_is_done():
    with subprocess.Popen([sys.executable, "-c", _FIRST_ENDS], stdout=subprocess.PIPE) as program:
        program.stdout.readline()
        assert InflightSyscall(program.pid, program.pid, ["60"]).wait(time.monotonic() + 60)
        program.kill()


_BYTES = 256 << 20
#: Maps memory and fills it, in one call that nothing interrupts.
_FILLER = f"""
import mmap, sys
print("ready", flush=True)
memory = mmap.mmap(-1, {_BYTES}, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x8000)
sys.stdin.read()
"""


def test_busy_kernel_call_is_awaited_whatever_its_cpu_time():
    with subprocess.Popen([sys.executable, "-c", _FILLER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as filler:
        filler.stdout.readline()
        call = InflightSyscall(filler.pid, filler.pid, ["9"])
        while _filled(filler.pid) < _BYTES // 16:
            time.sleep(0.0001)
        assert call.wait()
        filled = _filled(filler.pid)
        filler.stdin.close()

    assert filled >= _BYTES


def _filled(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
