"""Tells whether two processes share an open file, their memory or their descriptor table (kcmp(2))."""

from __future__ import annotations

import ctypes
import platform

_SYS_KCMP = {"x86_64": 312, "aarch64": 272}
_FILE, _VM, _FILES = 0, 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


def same_file(pid: int, fd: int, other: int, other_fd: int) -> bool:
    """Tell whether two descriptors, each of a process, mean the same open file."""
    return _compare(pid, other, _FILE, fd, other_fd) == 0


def same_table(pid: int, other: int) -> bool:
    """Tell whether two processes or threads share their descriptor table, as after clone(CLONE_FILES)."""
    return pid == other or _compare(pid, other, _FILES) == 0


def order_of_memory(pid: int, other: int) -> int | None:
    """Return 0 if two processes share their memory, else -1 or 1 by an order of the kernel's; None if it is unknown."""
    return {0: 0, 1: -1, 2: 1}.get(_compare(pid, other, _VM))


def _compare(pid: int, other: int, what: int, first: int = 0, second: int = 0) -> int:
    number = _SYS_KCMP[platform.machine()]
    return int(_libc.syscall(number, pid, other, what, ctypes.c_ulong(first), ctypes.c_ulong(second)))
