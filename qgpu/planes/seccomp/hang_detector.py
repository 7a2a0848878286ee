"""How a guardian that hangs is told from one that is only slow, while it is waited for an answer.

One that is held from outside will not answer. Of any other, only the time counts that it could have used: not what it
waits for a processor on a host that is busy. A call of the driver's that takes long would keep another one as well.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

from qgpu.guardian.proxy.seccomp_filter import ARCHES
from qgpu.linux import cgroup, proc

#: How often it is looked, from when an answer has not come for as long.
LOOK_MS = 50
#: One that is held is given up after this long,
_HELD_S = 0.15
#: one that has had this much time to answer then,
_HANGS_S = 0.35
#: and any after this long.
_PATIENCE_S = 2.0
#: The number of futex, in which a thread waits for another one of its process (asm/unistd.h).
_FUTEX = {"x86_64": "202", "aarch64": "98"}


@dataclass(slots=True)
class HangDetector:
    """That of a process whose first thread owes an answer since ``LOOK_MS``."""

    pid: int
    _began_s: float = field(init=False)
    _looked_s: float = field(init=False)
    _spent: tuple[int, int] = field(init=False)
    _ticks: tuple[int, int] = field(init=False)
    #: What of the time it could have used.
    _had_s: float = LOOK_MS / 1000

    def __post_init__(self) -> None:
        self._began_s = self._looked_s = time.monotonic()
        self._spent, self._ticks = _spent(self.pid), _times(self.pid)

    def look(self) -> None:
        """Raise TimeoutError when it is to be given up."""
        now_s, spent = time.monotonic(), _spent(self.pid)
        age_s = now_s - self._began_s + LOOK_MS / 1000
        self._had_s += self._had_since(now_s - self._looked_s, spent)
        self._looked_s, self._spent = now_s, spent
        if age_s >= _HELD_S and is_held(self.pid):
            raise TimeoutError("its process is stopped")
        if self._had_s >= _HANGS_S and not is_in_driver(self.pid, self._ticks):
            raise TimeoutError("it does not answer")
        if age_s >= _PATIENCE_S:
            raise TimeoutError("it does not answer, for a call of the driver or other processes keep it")

    def _had_since(self, passed_s: float, spent: tuple[int, int]) -> float:
        """Return what of the time since the last look the process could have used, or did."""
        ran_s, waited_s = ((now - before) / 1e9 for before, now in zip(self._spent, spent, strict=True))
        if not any(spent):  # a kernel that does not count it
            return passed_s
        if _stat(self.pid)[:1] == ["R"]:  # it runs, or waits, which is counted only when that is over
            return min(ran_s, passed_s)
        return max(0.0, passed_s - waited_s)


def is_held(pid: int) -> bool:
    """Tell whether a process was stopped, is traced or frozen."""
    return (_stat(pid) or ["-"])[0] in "Tt" or cgroup.is_frozen(pid)


def is_in_driver(pid: int, before: tuple[int, int] = (0, 0)) -> bool:
    """Tell whether a process's first thread is in an ioctl, or waits for one of its others while any of those is.

    Of one that runs, tell whether it was rather in the kernel of late.

    ``before`` is its time in user mode and in the kernel when that began, in clock ticks.
    """
    call = _call(pid, pid)
    if call == "running":
        user, system = _times(pid)
        return system - before[1] > user - before[0]
    ioctl = str(ARCHES[platform.machine()][0].ioctl)
    return call == ioctl or (call == _FUTEX[platform.machine()] and any(_call(pid, t) == ioctl for t in _threads(pid)))


def _times(pid: int) -> tuple[int, int]:
    fields = _stat(pid)
    return (int(fields[11]), int(fields[12])) if fields else (0, 0)


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _call(pid: int, tid: int) -> str:
    """Return the number of the call that a thread is in; "running" for none."""
    return _read(pid, "syscall", tid).partition(" ")[0]


def _stat(pid: int) -> list[str]:
    """Return the fields of a process's first thread; none where there is no descriptor left to read them with."""
    try:
        return proc.stat(pid, pid)
    except OSError:
        return []


def _spent(pid: int) -> tuple[int, int]:
    """Return for how long a process's first thread has run and waited for a processor, in ns; 0 where nobody counts."""
    fields = _read(pid, "schedstat").split()
    return (int(fields[0]), int(fields[1])) if fields else (0, 0)


def _read(pid: int, name: str, tid: int | None = None) -> str:
    """Read what the kernel tells of a process's first thread, or of another one."""
    try:
        return Path(f"/proc/{pid}/task/{tid or pid}/{name}").read_text().strip()
    except OSError:
        return ""
