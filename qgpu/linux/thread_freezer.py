"""Stops sibling threads (ptrace), so that no descriptor is swapped while the kernel performs a thread's call.

The kernel looks up the call's descriptor again after our check. In between, another thread could replace the file by
one with a device, and change the arguments, and so turn a harmless call into any other. So its siblings are stopped by
ptrace. Nobody in the pod can undo that, and it ends by itself if we die. It is an error if a thread cannot be stopped:
a thread with its own descriptor table, whose files we cannot see; a process that shares the table; a thread that is
already traced; or a kernel thread (io_uring).

To see that a call is done, its own thread is stopped too: ptrace stops a thread only outside the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from qgpu.linux import cgroup, kcmp, pod_processes, proc
from qgpu.linux.descriptor_tables import DescriptorTables

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_EVENT_STOP = 128
#: Stands for a signal of a thread that has ended.
_ENDED = -1
_ALL_THREADS = 0x40000000  # __WALL
#: How long a thread may take to stop, how often that is checked, and how much longer each look waits than the last.
_PATIENCE_S, _LOOK_S, _LOOK_SELDOM_S, _GROWTH = 1.0, 0.00005, 0.01, 1.25
#: After how long a tracer that has not begun is helped.
_STUCK_S = 0.1
#: The threads that are about to be traced to see whether they leave the kernel.
_looked_at: set[int] = set()

_T = TypeVar("_T")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def run_as_tracer(pid: int, act: Callable[[], _T]) -> _T:
    """Run in a thread that traces a process's: if it still does when it ends, the kernel lets them go on."""
    done: list[_T] = []

    def steps() -> Iterator[None]:
        done.append(act())
        yield

    begin_as_tracer(pid, steps()).join()
    return done[0]


def begin_as_tracer(pid: int, steps: Iterator[None]) -> threading.Thread:
    """Run steps in such a thread; return it after the first one, or raise what that raises."""
    begun, failed = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            next(steps)
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            failed.append(error)
            return
        finally:
            begun.set()
        for _ in steps:
            pass

    thread = threading.Thread(target=run, name="qgpu-tracer", daemon=True)
    thread.start()
    while not begun.wait(_STUCK_S):
        _reap_threads(pid)
    if failed:
        thread.join()
        raise failed[0]
    return thread


def _reap_threads(pid: int) -> None:
    """Let go of a process's ended threads: one that executes a program waits for that, and its tracer for it.

    Any thread of ours may do so for the tracer, which waits to trace one more.
    """
    with suppress(OSError):  # the process has ended, or we look again
        for thread in proc.threads(pid) - {pid}:
            if proc.stat(pid, thread)[:1] == ["Z"]:
                with suppress(ChildProcessError):
                    os.waitpid(thread, _ALL_THREADS | os.WNOHANG)


def leaves_kernel(tid: int, runs: Callable[[], bool], deadline: float) -> bool:
    """Wait until a thread leaves the kernel, and let it go on, or until it has ended.

    Return False if it cannot be stopped, if it no longer ``runs`` when it is about to be, because a stop would end
    some calls in which it may wait, or if it has not left by ``deadline``, of the monotonic clock.

    A thread that executes a program cannot be traced before its siblings are gone; if the caller keeps them stopped,
    it must go on to see that. Nor can any thread while its process opens a program, for as long as the pod likes: so
    there is one look at a time.
    """
    left: list[bool] = []

    def act() -> None:
        try:
            left.append(_leaves_kernel(tid, runs, deadline))
        finally:
            _looked_at.discard(tid)

    if tid in _looked_at:
        return False
    look = threading.Thread(target=act, daemon=True)
    try:
        _looked_at.add(tid)
        look.start()
    except RuntimeError:  # no thread can be started now
        _looked_at.discard(tid)
        return False
    look.join(deadline - time.monotonic() + _PATIENCE_S)
    return any(left)


def _leaves_kernel(tid: int, runs: Callable[[], bool], deadline: float) -> bool:
    if _libc.ptrace(_SEIZE, tid, None, None) < 0:
        return ctypes.get_errno() == errno.ESRCH
    if not runs():
        return False
    _libc.ptrace(_INTERRUPT, tid, None, None)
    wait_s = _LOOK_S
    while (signal := _signal_of_stop(tid)) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(wait_s)
        wait_s = min(_GROWTH * wait_s, _LOOK_SELDOM_S)
    _libc.ptrace(_DETACH, tid, None, signal)
    return True


def threads_of(cgroups: Iterable[str], pids: Iterable[int]) -> set[int]:
    """List the threads in cgroups and below them, and those of known processes, which may have left. Raises OSError.

    Each of them is in the list that is there all the time, wherever in the cgroups it is moved meanwhile. A process
    that ends while it is asked for its cgroup may have been there: its number is in the list, too.
    """
    tops, known = tuple(cgroups), set(pids)
    inside = cgroup.undivided_threads(*tops)
    found = inside or set()
    for pid in known if inside is not None else pod_processes.processes_of(tops, known):
        try:
            found |= proc.threads(pid)
        except (FileNotFoundError, ProcessLookupError):
            found |= {pid} - known
    return found


@contextmanager
def frozen_siblings(
    pid: int, tid: int, processes: Callable[[], Iterable[int]], tables: DescriptorTables
) -> Iterator[None]:
    """Keep every thread of a process but one stopped; ``processes`` lists all that may share its descriptors.

    Call it in ``run_as_tracer``. Raises OSError if a thread cannot be stopped, or shares the descriptors.
    """
    stopped: dict[int, int] = {}
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while threads := proc.threads(pid) - {tid} - stopped.keys():
            interrupted = [thread for thread in threads if _interrupt(pid, thread)]
            for thread in interrupted:  # by now, most have stopped
                if (signal := _signal_once_stopped(thread, deadline)) != _ENDED:  # its number may be a new thread's
                    stopped[thread] = signal
            if not interrupted:  # they have ended, and a list may lack those behind one that goes just then
                if pid in threads or time.monotonic() >= deadline:
                    raise OSError(errno.EBUSY, f"thread {min(threads)} has ended and is still there")
                time.sleep(_LOOK_S)
        if not kcmp.same_table(pid, tid):  # only now, because the first thread could leave it before
            raise OSError(errno.EPERM, f"thread {tid} has its own descriptor table")
        tables.check_alone(pid, processes)
        yield
    finally:
        for thread, signal in stopped.items():
            _libc.ptrace(_DETACH, thread, None, signal)


def _interrupt(pid: int, thread: int) -> bool:
    """Trace a thread, and have it stop; False if it has ended. Raises OSError."""
    if _libc.ptrace(_SEIZE, thread, None, None) < 0:
        code = ctypes.get_errno()
        if code == errno.ESRCH or _has_ended(pid, thread):
            return False
        raise OSError(code, f"thread {thread}: {os.strerror(code)}")
    _libc.ptrace(_INTERRUPT, thread, None, None)
    return True


def _signal_once_stopped(thread: int, deadline: float) -> int:
    """Wait until a thread has stopped; return what ``_signal_of_stop`` does. Raises OSError."""
    while True:
        if (signal := _signal_of_stop(thread)) is not None:
            return signal
        if time.monotonic() >= deadline:
            raise OSError(errno.EBUSY, f"thread {thread} does not stop")
        time.sleep(_LOOK_S)


def _signal_of_stop(thread: int) -> int | None:
    """Return the signal pending for a thread when it stopped, 0 for none, _ENDED if it has ended; None before that."""
    try:
        seen, status = os.waitpid(thread, _ALL_THREADS | os.WNOHANG)
    except ChildProcessError:  # it ended, and was reaped
        return _ENDED
    if not seen:
        return None
    if not os.WIFSTOPPED(status):
        return _ENDED
    return os.WSTOPSIG(status) if status >> 16 != _EVENT_STOP else 0


def _has_ended(pid: int, thread: int) -> bool:
    return (proc.stat(pid, thread) or ["X"])[0] in "ZX"
