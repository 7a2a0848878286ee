"""Holds everybody still who could exchange a thread's descriptors while the kernel carries out a call for it.

The kernel looks up anew which file a descriptor means: between our look and its own, another thread could put a file
with a device there, and other arguments, and what was let through as harmless would make anything. So its siblings are
stopped by ptrace meanwhile, which nobody in the pod can undo and which ends by itself should we die. What cannot be
stopped is an error: a thread with a table of its own, whose files we cannot see; a process that shares the table; a
thread that is traced already, or the kernel's (io_uring).

That the call is over is seen as surely: its thread is stopped as well, which it is only outside of the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from qgpu.linux import kcmp, proc
from qgpu.linux.inflight_syscalls import InflightSyscall

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_EVENT_STOP = 128
_ALL_THREADS = 0x40000000  # __WALL
#: How long a thread may take to leave the kernel, and how often it is looked whether it has.
_PATIENCE_S, _LOOK_S, _LOOK_SELDOM_S = 1.0, 0.00005, 0.01
#: How long a call is waited for before its thread is stopped to see that it is over.
_SOON_S = 0.003

_T = TypeVar("_T")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def apart(act: Callable[[], _T]) -> _T:
    """Do something in a thread of its own: whatever that still traces when it ends goes on, stopped or not."""
    done: list[_T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(act())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            failed.append(error)

    thread = threading.Thread(target=run, name="qgpu-still", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def wait_until_over(call: InflightSyscall) -> None:
    """Wait until the kernel has carried out a call, however long that takes. To be done ``apart``."""
    soon, wait_s = time.monotonic() + _SOON_S, _LOOK_S
    while not call.left():
        if time.monotonic() > soon and _leaves_kernel(call):
            return
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LOOK_SELDOM_S)


def _leaves_kernel(call: InflightSyscall) -> bool:
    """Return when a thread has left the kernel, and let it go on; where it cannot be stopped, tell whether it has."""
    if _libc.ptrace(_SEIZE, call.tid, None, None) < 0:
        return call.over()
    _libc.ptrace(_INTERRUPT, call.tid, None, None)
    wait_s = _LOOK_S
    while (signal := _signal_of_stop(call.tid)) is None:
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LOOK_SELDOM_S)
    _libc.ptrace(_DETACH, call.tid, None, signal)
    return True


@contextmanager
def held(pid: int, tid: int, processes: Iterable[int]) -> Iterator[None]:
    """Keep every thread of a process but one still; ``processes`` are others that could share its descriptors.

    To be done ``apart``. Raises OSError where somebody cannot be kept still.
    """
    if not kcmp.same_table(pid, tid):
        raise OSError(errno.EPERM, f"thread {tid} has descriptors of its own")
    stopped: dict[int, int] = {}
    try:
        while threads := _threads(pid) - {tid} - stopped.keys():
            for thread in threads:
                stopped[thread] = _stop(pid, thread)
        for other in processes:
            if other != pid and kcmp.same_table(pid, other):
                raise OSError(errno.EPERM, f"process {other} shares the descriptors of process {pid}")
        yield
    finally:
        for thread, signal in stopped.items():
            _libc.ptrace(_DETACH, thread, None, signal)


def _threads(pid: int) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{pid}/task")}


def _stop(pid: int, thread: int) -> int:
    """Stop a thread; return the signal that it was about to get, 0 for none. Raises OSError."""
    if _libc.ptrace(_SEIZE, thread, None, None) < 0:
        code = ctypes.get_errno()
        if code == errno.ESRCH or _has_ended(pid, thread):
            return 0
        raise OSError(code, f"thread {thread}: {os.strerror(code)}")
    _libc.ptrace(_INTERRUPT, thread, None, None)
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        if (signal := _signal_of_stop(thread)) is not None:
            return signal
        time.sleep(_LOOK_S)
    raise OSError(errno.EBUSY, f"thread {thread} does not stop")


def _signal_of_stop(thread: int) -> int | None:
    """Return the signal that a thread was about to get when it stopped or ended, 0 for none; None before that."""
    try:
        seen, status = os.waitpid(thread, _ALL_THREADS | os.WNOHANG)
    except ChildProcessError:  # it ended, and somebody has taken note
        return 0
    if not seen:
        return None
    return os.WSTOPSIG(status) if os.WIFSTOPPED(status) and status >> 16 != _EVENT_STOP else 0


def _has_ended(pid: int, thread: int) -> bool:
    return (proc.stat(pid, thread) or ["X"])[0] in "ZX"
