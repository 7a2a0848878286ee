"""Calls that the kernel carries out for a pod's thread, and how to tell that they are over."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from qgpu.linux import fd_budget, proc
from qgpu.linux.seccomp_notify import Notification

#: How often it is looked whether a call that is waited for is over.
_LOOK_S = 0.0005
#: Where the kernel has a thread wait for an answer of ours (kernel/seccomp.c; the first may be inlined in the second).
_STOPPED_AT = ("seccomp_do_user_notification", "__seccomp_filter")


@dataclass(frozen=True, slots=True)
class InflightSyscall:
    """One such call, as /proc shows it while it lasts; ``size`` is what it is about, in bytes."""

    pid: int
    tid: int
    shown: list[str]
    ticks: int
    size: int = 0

    @classmethod
    def of(cls, call: Notification, pid: int, size: int = 0) -> InflightSyscall:
        """Take note of a call before it is let through."""
        shown = [str(call.number), *(f"{argument:#x}" for argument in call.arguments)]
        return cls(pid, call.tid, shown, fd_budget.patiently(lambda: user_ticks(pid, call.tid)), size)

    def over(self) -> bool:
        """Tell whether the thread is as good as certain to have left the call.

        One that runs could be anywhere; it has left when it has spent time in user mode since, of which the kernel
        tells up to a tick too much, or more where a hypervisor has stopped the CPU meanwhile.
        """
        left = self.left()
        try:
            return left if left is not None else user_ticks(self.pid, self.tid) > self.ticks + 1
        except OSError:  # we could not look
            return False

    def left(self) -> bool | None:
        """Tell whether the thread has left the call; None when that cannot be told, for it runs.

        One that stands in a call of the same numbers may be in the next: then it waits for us, and it is no longer in
        one that we have answered.
        """
        try:
            now = Path(f"/proc/{self.pid}/task/{self.tid}/syscall").read_text().split()
        except OSError as error:
            return error.errno not in fd_budget.NONE_LEFT
        if now[0] == "running":
            return None
        return now[: len(self.shown)] != self.shown or _waits_for_us(self.pid, self.tid)


@dataclass(slots=True)
class InflightSyscalls:
    """Such calls of one kind, by thread."""

    calls: dict[int, InflightSyscall] = field(default_factory=dict)

    def let(self, call: Notification, pid: int, size: int = 0) -> None:
        """Take note of a call that is let through."""
        self.calls[call.tid] = InflightSyscall.of(call, pid, size)

    def ended(self, tid: int) -> InflightSyscall | None:
        """Take note that a thread makes another call: what it was in is over."""
        return self.calls.pop(tid, None)

    def take_over(self) -> list[InflightSyscall]:
        """Return those that are over, which are then no longer pending."""
        over = {tid: loose for tid, loose in self.calls.items() if loose.over()}
        for tid in over:
            del self.calls[tid]
        return list(over.values())

    def wait(self, patience_s: float) -> bool:
        """Wait until none is pending; False when one is still after that time."""
        deadline = time.monotonic() + patience_s
        self.take_over()
        while self.calls and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            self.take_over()
        return not self.calls


def _waits_for_us(pid: int, tid: int) -> bool:
    """Tell whether a thread is stopped in a call that we have not received yet.

    The order matters: having been answered, a thread can be found there once more while it waits for a lock, but then
    not in a sleep that signals end, and after such a sleep not in the same call.
    """
    try:
        if proc.stat(pid, tid)[:1] != ["S"]:
            return False
        return Path(f"/proc/{pid}/task/{tid}/wchan").read_text().startswith(_STOPPED_AT)
    except OSError:
        return False


def user_ticks(pid: int, tid: int) -> int:
    """Return the time a thread has had in user mode, in clock ticks; one that is gone has had all it will."""
    fields = proc.stat(pid, tid)
    return int(fields[11]) if fields else 1 << 62
