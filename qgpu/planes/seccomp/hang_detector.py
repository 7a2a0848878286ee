"""Tells a guardian that hangs from one that is slow, while the daemon waits for its answer.

A stopped, traced or frozen guardian will not answer. For any other, only the time counts in which it could have run,
not the time that it waits for a CPU on a busy host, nor the time that it waits for a thread of its own that does. A
guardian in a long driver call gets more time, because a successor would wait for the driver as well.

It also finds out whether the guardian's threads wait for pages of pods, and whether its end would end these waits.
"""

from __future__ import annotations

import platform
import time
from contextlib import suppress
from pathlib import Path

from qgpu.guardian.proxy.seccomp_filter import ARCHES
from qgpu.linux import cgroup, proc
from qgpu.linux.killed_process import FUSE_WAITS

#: How often the guardian is checked, starting when an answer is this late.
LOOK_MS = 50
#: A stopped, traced or frozen guardian is given up after this long,
_HELD_S = 0.15
#: one that could have run for this long without an answer,
_HANGS_S = 0.35
#: and any guardian after this long.
_PATIENCE_S = 2.0
#: The numbers of futex, in which a thread waits for another thread of its process, and of process_vm_readv and
#: process_vm_writev (asm/unistd.h).
_CALLS = {"x86_64": ("202", "310", "311"), "aarch64": ("98", "270", "271")}
_FUTEX, _READ, _WRITE = _CALLS.get(platform.machine(), (None, None, None))
#: Where these wait for a page until a fatal signal comes: for a userfaultfd (fs/userfaultfd.c), and when they read, for
#: the page of a file (mm/filemap.c, until and since Linux 5.16). Other waits may last until a file server answers.
_USERFAULT, _FILE_PAGE = "handle_userfault", {"wait_on_page_bit_common", "folio_wait_bit_common"}
#: A thread that sleeps in the driver all the time between so many looks may hang there.
_LOOKS = 4


class HangDetector:
    """Watches a process whose first thread has owed an answer for ``LOOK_MS``."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began_s = self._looked_s = time.monotonic()
        self._spent, self._ticks = _spent(pid), _times(pid)
        #: The CPU time of all its threads, and the time in which it could have run.
        self._used_s, self._had_s = proc.cpu_s(pid), LOOK_MS / 1000

    def look(self) -> None:
        """Check the process. Raises TimeoutError when it must be given up."""
        now_s, spent, used_s = time.monotonic(), _spent(self._pid), proc.cpu_s(self._pid)
        age_s = now_s - self._began_s + LOOK_MS / 1000
        self._had_s += self._had_since(now_s - self._looked_s, spent, used_s - self._used_s)
        self._looked_s, self._spent, self._used_s = now_s, spent, used_s
        if age_s >= _HELD_S and ((_stat(self._pid) or ["-"])[0] in "Tt" or cgroup.is_frozen(self._pid)):
            raise TimeoutError("its process is stopped")
        if self._had_s >= _HANGS_S and not is_in_driver(self._pid, self._ticks):
            raise TimeoutError("it does not answer")
        if age_s >= _PATIENCE_S:
            raise TimeoutError("it does not answer: a driver call or other processes delay it")

    def _had_since(self, passed_s: float, spent: tuple[int, int], used_s: float) -> float:
        """Return how much of the time since the last check the process could have run, or ran."""
        ran_s, waited_s = ((now - before) / 1e9 for before, now in zip(self._spent, spent, strict=True))
        if not any(spent):  # this kernel has no schedstat
            return passed_s
        if _stat(self._pid)[:1] == ["R"]:  # it runs, or waits for a CPU, which the kernel counts only afterwards
            return min(ran_s, passed_s)
        if _waits_for_running_thread(self._pid):  # Python's lock is held by a thread that runs, or waits for a CPU
            return min(used_s, passed_s)
        return max(0.0, passed_s - waited_s)


def is_in_driver(pid: int, before: tuple[int, int] = (0, 0)) -> bool:
    """Tell whether a process's first thread is in an ioctl, or waits for another of its threads that is in one.

    For a running thread, tell whether it was mostly in the kernel since ``before``: its time in user mode and in the
    kernel at the start of the wait, in clock ticks.
    """
    call = _call(pid, pid)
    if call == "running":
        user, system = _times(pid)
        return system - before[1] > user - before[0]
    ioctl = str(ARCHES[platform.machine()][0].ioctl)
    return call == ioctl or (call == _FUTEX and any(_call(pid, t) == ioctl for t in _threads(pid)))


def waits_for_pages(pid: int) -> bool:
    """Tell whether threads of a process wait for pages of others, and SIGKILL would end every wait of its threads.

    If it would not, nobody may kill the guardian: a thread that outlives SIGKILL may keep the journal from a successor,
    and keeps the guardian's memory. A thread that sleeps in the driver leaves it by itself, unless it never wakes up
    while we look.
    """
    lasting = _deep_sleeps(pid)
    for _ in range(_LOOKS - 1):
        if lasting:
            time.sleep(LOOK_MS / 1000)
            lasting &= _deep_sleeps(pid)
    found = {_waits_for_page(pid, tid) for tid in _threads(pid)}
    return not lasting and True in found and False not in found


def _deep_sleeps(pid: int) -> set[tuple[int, str]]:
    """Return the threads that no signal wakes up, but for those that wait for pages, each with its turns on CPUs."""
    asleep = {tid for tid in _threads(pid) if _stat(pid, tid)[:1] == ["D"] and _call(pid, tid) not in (_READ, _WRITE)}
    return {(tid, _read(pid, "schedstat", tid)) for tid in asleep}


def _waits_for_page(pid: int, tid: int) -> bool | None:
    """Tell whether a thread waits for another process's page; False if SIGKILL might not end its wait."""
    call, where = _call(pid, tid), _read(pid, "wchan", tid)
    if call not in (_READ, _WRITE):
        return False if where.startswith(FUSE_WAITS) else None
    return where == _USERFAULT or (call == _READ and where in _FILE_PAGE)


def _waits_for_running_thread(pid: int) -> bool:
    """Tell whether a process's first thread waits for another of its threads that runs, or waits for a CPU."""
    return _call(pid, pid) == _FUTEX and any(_stat(pid, tid)[:1] == ["R"] for tid in _threads(pid))


def _times(pid: int) -> tuple[int, int]:
    fields = _stat(pid)
    return (int(fields[11]), int(fields[12])) if fields else (0, 0)


def _threads(pid: int) -> set[int]:
    with suppress(OSError):
        return proc.threads(pid)
    return set()


def _call(pid: int, tid: int) -> str:
    """Return the number of the system call that a thread is in, "running" for none."""
    return _read(pid, "syscall", tid).partition(" ")[0]


def _stat(pid: int, tid: int | None = None) -> list[str]:
    """Return the stat fields of a process's first or another thread; none without a free descriptor to read them."""
    with suppress(OSError):
        return proc.stat(pid, tid or pid)
    return []


def _spent(pid: int) -> tuple[int, int]:
    """Return how long a process's first thread has run and waited for a CPU, in ns; 0 without schedstat."""
    fields = _read(pid, "schedstat").split()
    return (int(fields[0]), int(fields[1])) if fields else (0, 0)


def _read(pid: int, name: str, tid: int | None = None) -> str:
    """Read a /proc file of a process's first thread, or of another thread."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/task/{tid or pid}/{name}").read_text().strip()
    return ""
