"""System calls that the kernel is performing for a pod's thread, and how to tell when they are done."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from qgpu.linux import fd_budget, proc
from qgpu.linux.seccomp_notify import Notification

#: How often a call that is waited for is checked, and for how long that often where the thread may never wait.
_LOOK_S = 0.0005
_SOON_S, _LOOK_SELDOM_S = 0.1, 0.05
#: How much longer each look at a call that is waited for waits than the last.
_GROWTH = 1.1
#: From how many calls on those that are done are removed.
_MOST = 1 << 12
#: In /proc/PID/syscall: the second argument, and the number and six arguments.
_REQUEST_AT, _WORDS = 2, 7
#: The numbers of ioctl there: of x86-64, i386, x32 and of 64-bit ARM.
_IOCTLS = frozenset({"16", "54", str(0x40000000 | 514)} if platform.machine() == "x86_64" else {"29"})
#: In /proc/PID/stat from the state on: the thread's flags, of which this one marks threads of io_uring.
_FLAGS_AT, _PF_IO_WORKER = 6, 0x10
#: Where a thread waits for our answer (kernel/seccomp.c; the first function may be inlined in the second).
_STOPPED_AT = ("seccomp_do_user_notification", "__seccomp_filter")
#: The states of a thread that a signal or a tracer has stopped.
_STOPPED = ("T", "t")


@dataclass(frozen=True, slots=True)
class InflightSyscall:
    """One such call, as /proc shows it while it runs; ``size`` is the size of its object in bytes."""

    pid: int
    tid: int
    proc_syscall: list[str]
    ticks: int
    size: int = 0

    @classmethod
    def of(cls, call: Notification, pid: int, size: int = 0) -> InflightSyscall:
        """Record a call before it continues in the kernel."""
        proc_syscall = [str(call.number), *(f"{argument:#x}" for argument in call.arguments)]
        return cls(pid, call.tid, proc_syscall, fd_budget.retry_on_emfile(lambda: user_ticks(pid, call.tid)), size)

    def is_done(self) -> bool:
        """Tell whether the thread has left the call, as far as can be told.

        A running thread may be anywhere. It has left the call once it has spent time in user mode since; the kernel may
        count up to one tick too much, or more if a hypervisor stopped the CPU.
        """
        left = self.has_left()
        try:
            return left if left is not None else user_ticks(self.pid, self.tid) > self.ticks + 1
        except OSError:  # unknown
            return False

    def has_left(self) -> bool | None:
        """Tell whether the thread has left the call; None while it runs, when that is unknown.

        A thread that is in a call with the same number and arguments may be in the next one. If it waits for our answer
        it is, because we have answered this one. A thread that a signal or a tracer has stopped has left its call.
        """
        try:
            now = proc.syscall(self.pid, self.tid)
        except OSError as error:
            return error.errno not in fd_budget.OUT_OF_FDS
        if now[:1] == ["running"]:
            return None
        if now[: len(self.proc_syscall)] != self.proc_syscall:
            return True
        try:
            return _state(self.pid, self.tid) in _STOPPED or _waits_for_us(self.pid, self.tid)
        except OSError:  # unknown
            return False


@dataclass(slots=True)
class InflightSyscalls:
    """Calls of one kind, by thread."""

    calls: dict[int, InflightSyscall] = field(default_factory=dict)

    def add(self, call: Notification, pid: int, size: int = 0) -> None:
        """Record a call that continues in the kernel."""
        if len(self.calls) >= _MOST:
            self.take_done()
        self.calls[call.tid] = InflightSyscall.of(call, pid, size)

    def find(
        self, threads: Iterable[int], is_wanted: Callable[[int], bool], leaves_kernel: Callable[[InflightSyscall], bool]
    ) -> None:
        """Record calls that are in progress, by their request: ioctls that a dead guardian let continue.

        A thread that runs may be in such a call. So it is looked at until it waits, or has spent time in user mode; or,
        after a moment, until ``leaves_kernel`` has seen it outside of calls. Threads of io_uring make no such calls.
        """
        read = fd_budget.retry_on_emfile
        left = {tid: read(partial(user_ticks, tid, tid)) for tid in threads if not read(partial(_is_of_io_uring, tid))}
        began = time.monotonic()
        while left:
            for tid, ticks in list(left.items()):
                words = read(partial(proc.syscall, tid, tid))
                call = InflightSyscall(tid, tid, words[:_WORDS], ticks)
                if words[:1] == ["running"]:
                    if read(partial(user_ticks, tid, tid)) <= ticks + 1 and not (
                        time.monotonic() > began + _SOON_S and leaves_kernel(call)
                    ):
                        continue
                elif words[:1] and words[0] in _IOCTLS and is_wanted(int(words[_REQUEST_AT], 16)):
                    self.calls[tid] = call
                del left[tid]
            if left:
                time.sleep(_LOOK_S if time.monotonic() < began + _SOON_S else _LOOK_SELDOM_S)

    def remove(self, tid: int) -> InflightSyscall | None:
        """Remove and return a thread's call: the thread makes another call, so this one is done."""
        return self.calls.pop(tid, None)

    def take_done(self) -> list[InflightSyscall]:
        """Remove and return the calls that are done."""
        done = {tid: call for tid, call in self.calls.items() if call.is_done()}
        for tid in done:
            del self.calls[tid]
        return list(done.values())

    def wait(self, patience_s: float, is_done: Callable[[InflightSyscall], bool] = InflightSyscall.is_done) -> bool:
        """Wait until no call is left; False if one remains after that time. One call is looked at at a time."""
        deadline, wait_s = time.monotonic() + patience_s, _LOOK_S
        while self.calls:
            tid, call = next(iter(self.calls.items()))
            if is_done(call):
                del self.calls[tid]
            elif time.monotonic() >= deadline:
                return False
            else:
                time.sleep(wait_s)
                wait_s = min(_GROWTH * wait_s, _LOOK_SELDOM_S)
        return True


def _waits_for_us(pid: int, tid: int) -> bool:
    """Tell whether a thread is stopped in a call that we have not received yet.

    The order of the two checks matters. A thread that was answered can appear there once more while it waits for a
    lock, but then not in an interruptible sleep, and after such a sleep not in the same call.
    """
    try:
        if _state(pid, tid) != "S":
            return False
        return proc.wchan(pid, tid).startswith(_STOPPED_AT)
    except OSError:
        return False


def _is_of_io_uring(tid: int) -> bool:
    fields = proc.stat(tid, tid)
    return bool(fields) and bool(int(fields[_FLAGS_AT]) & _PF_IO_WORKER)


def _state(pid: int, tid: int) -> str:
    return "".join(proc.stat(pid, tid)[:1])


def user_ticks(pid: int, tid: int) -> int:
    """Return a thread's time in user mode, in clock ticks; a huge number if it has ended."""
    fields = proc.stat(pid, tid)
    return int(fields[11]) if fields else 1 << 62
