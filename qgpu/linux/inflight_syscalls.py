"""System calls that the kernel is performing for a pod's thread, and how to tell when they are done."""

from __future__ import annotations

import errno
import math
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TypeVar

from qgpu.linux import fd_budget, proc, seccomp_notify, thread_freezer
from qgpu.linux.seccomp_notify import RECEIVED, Notification

_T = TypeVar("_T")

#: How often a call that is waited for is checked at first and at last, and how much longer each look waits.
_LOOK_S, _LOOK_SELDOM_S, _GROWTH = 0.00005, 0.05, 1.25
#: How long a thread that runs is only looked at before it is stopped, in a call that we follow and in a search; and how
#: long a stop is waited for before the thread is looked at again.
_SOON_S, _SEARCH_SOON_S, _STOP_S = 0.0005, 0.1, 0.05
#: How long a search may take.
_SEARCH_S = 10.0
#: From how many calls on each new one has the oldest looked at, and how many of them.
_MANY, _LOOKED_AT = 64, 2
#: In /proc/PID/syscall: the second argument, and the number and six arguments.
_REQUEST_AT, _WORDS = 2, 7
#: The numbers of ioctl there: of x86-64, i386, x32 and of 64-bit ARM.
_IOCTLS = frozenset({"16", "54", str(0x40000000 | 514)} if platform.machine() == "x86_64" else {"29"})
#: In /proc/PID/stat from the state on: the thread's flags, of which this one marks threads of io_uring.
_FLAGS_AT, _PF_IO_WORKER = 6, 0x10
#: Where a thread waits for our answer, and where it waits when its cgroup is frozen, outside of its call; with the
#: functions that these may be inlined in (kernel/seccomp.c, kernel/signal.c).
_WAITS_AT = ("seccomp_do_user_notification", "__seccomp_filter", "do_freezer_trap", "get_signal")
#: What kernels before 5.16 say on x86: they cannot tell.
_UNKNOWN = "0"
#: The states of a thread that a signal or a tracer has stopped.
_STOPPED = ("T", "t")


@dataclass(frozen=True, slots=True)
class InflightSyscall:
    """One such call, as /proc shows it while it runs; ``size`` is the size of its object in bytes."""

    pid: int
    tid: int
    proc_syscall: list[str]
    size: int = 0

    @classmethod
    def of(cls, call: Notification, pid: int, size: int = 0) -> InflightSyscall:
        """Record a call before it continues in the kernel."""
        return cls(pid, call.tid, [str(call.number), *(f"{argument:#x}" for argument in call.arguments)], size)

    def wait(self, deadline: float = math.inf, soon: float | None = None) -> bool:
        """Wait until the thread has left the call; False if it has not by ``deadline``, of the monotonic clock.

        A thread that runs may be anywhere. From ``soon`` on, by default in a moment, it is stopped to see where it is.
        """
        soon, wait_s = time.monotonic() + _SOON_S if soon is None else soon, _LOOK_S
        while not (left := self.has_left()):
            if (now := time.monotonic()) >= deadline:
                return False
            if left is None and now >= soon and self._leaves_kernel(min(deadline, now + _STOP_S)):
                return True
            time.sleep(wait_s)
            wait_s = min(_GROWTH * wait_s, _LOOK_SELDOM_S)
        return True

    def _leaves_kernel(self, deadline: float) -> bool:
        return thread_freezer.leaves_kernel(self.tid, lambda: self.has_left() is None, deadline)

    def has_left(self) -> bool | None:
        """Tell whether the thread has left the call; None if only stopping it shows that: it runs, for example.

        A thread that is in a call with the same number and arguments may be in the next one. If it waits for our answer
        it is, because we have answered this one. A thread that a signal or a tracer has stopped has left its call, and
        so has one whose cgroup is frozen.
        """
        if self.tid in RECEIVED:
            return True
        try:
            now = proc.syscall(self.pid, self.tid)
        except OSError as error:
            return error.errno not in fd_budget.OUT_OF_FDS
        if now[:1] == ["running"]:
            return None
        if now[: len(self.proc_syscall)] != self.proc_syscall:
            return True
        try:
            return _state(self.pid, self.tid) in _STOPPED or _waits_outside(self.pid, self.tid)
        except OSError:  # unknown
            return False


@dataclass(slots=True)
class InflightSyscalls:
    """Calls of one kind, by thread."""

    calls: dict[int, InflightSyscall] = field(default_factory=dict)

    def add(self, call: Notification, pid: int, size: int = 0) -> list[InflightSyscall]:
        """Record a call that continues in the kernel; of many recorded ones, remove and return some that are done.

        A thread has one call at most, so the number of threads bounds these.
        """
        oldest = list(islice(self.calls, _LOOKED_AT)) if len(self.calls) >= _MANY else []
        done = []
        for looked_at in map(self.calls.pop, oldest):
            if looked_at.has_left():
                done.append(looked_at)
            else:
                self.calls[looked_at.tid] = looked_at
        self.calls[call.tid] = InflightSyscall.of(call, pid, size)
        return done

    def find(self, threads: Iterable[int], is_wanted: Callable[[int], bool]) -> None:
        """Record calls that are in progress, by their request: ioctls that a dead guardian let continue.

        A thread that runs may be in such a call. So it is looked at until it waits; or, after a moment, until it was
        seen outside of calls. Threads of io_uring make no such calls. Raises OSError if a thread cannot be looked at,
        or too late.
        """
        left = {tid for tid in threads if not _read(_is_of_io_uring, tid)}
        began, wait_s = time.monotonic(), _LOOK_S
        while left:
            for tid in sorted(left):
                words = _read(proc.syscall, tid, tid)
                if words[:1] == ["running"]:
                    now, runs = time.monotonic(), partial(_runs, tid)
                    if now < began + _SEARCH_SOON_S or not thread_freezer.leaves_kernel(tid, runs, now + _STOP_S):
                        continue
                elif words[:1] and words[0] in _IOCTLS and is_wanted(int(words[_REQUEST_AT], 16)):
                    self.calls[tid] = InflightSyscall(tid, tid, words[:_WORDS])
                left.discard(tid)
            if left:
                if time.monotonic() > began + _SEARCH_S:
                    raise TimeoutError(errno.ETIMEDOUT, f"{len(left)} threads run all the time")
                time.sleep(wait_s)
                wait_s = min(_GROWTH * wait_s, _LOOK_SELDOM_S)

    def remove(self, tid: int) -> InflightSyscall | None:
        """Remove and return a thread's call: the thread makes another call, so this one is done."""
        return self.calls.pop(tid, None)

    def take_done(self, patience_s: float) -> list[InflightSyscall]:
        """Remove and return the calls that are done, or are so within that time."""
        began = time.monotonic()
        done = [call for call in self.calls.values() if call.wait(began + patience_s, began + _SOON_S)]
        for call in done:
            del self.calls[call.tid]
        return done

    def wait(self, patience_s: float) -> bool:
        """Wait until no call is left; False if one remains after that time. One call is looked at at a time."""
        deadline = time.monotonic() + patience_s
        while self.calls:
            tid, call = next(iter(self.calls.items()))
            if not call.wait(deadline):
                return False
            del self.calls[tid]
        return True


def _read(look: Callable[..., _T], *about: int) -> _T:
    return fd_budget.retry_on_emfile(partial(look, *about))


def _runs(tid: int) -> bool:
    return _read(proc.syscall, tid, tid)[:1] == ["running"]


def _waits_outside(pid: int, tid: int) -> bool | None:
    """Tell whether a thread waits before a call that we have not received yet, or after one; None if it may.

    The order of the two checks matters. A thread that was answered can appear there once more while it waits for a
    lock, but then not in an interruptible sleep, and after such a sleep not in the same call.
    """
    try:
        if _state(pid, tid) != "S":
            return False
        where = proc.wchan(pid, tid)
        if where == _UNKNOWN:  # a stop can end the call itself, so there must be a reason to stop it
            return None if seccomp_notify.another_call_waits() else False
        return where.startswith(_WAITS_AT)
    except OSError:
        return False


def _is_of_io_uring(tid: int) -> bool:
    fields = proc.stat(tid, tid)
    return bool(fields) and bool(int(fields[_FLAGS_AT]) & _PF_IO_WORKER)


def _state(pid: int, tid: int) -> str:
    return "".join(proc.stat(pid, tid)[:1])
