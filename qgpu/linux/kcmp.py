"""Tells whether two processes share an open file or their descriptor table (kcmp(2))."""

from __future__ import annotations

import ctypes
import platform

_SYS_KCMP = {"x86_64": 312, "aarch64": 272}
_FILE, _FILES = 0, 2
_libc = ctypes.CDLL(None, use_errno=True)


def same_file(pid: int, fd: int, other: int, other_fd: int) -> bool:
    """Tell whether two descriptors, each of a process, mean the same open file."""
    return _same(pid, other, _FILE, fd, other_fd)


def same_table(pid: int, other: int) -> bool:
    """Tell whether two processes or threads share their descriptor table, as after clone(CLONE_FILES)."""
    return pid == other or _same(pid, other, _FILES)


def _same(pid: int, other: int, what: int, first: int = 0, second: int = 0) -> bool:
    number = _SYS_KCMP[platform.machine()]
    return bool(_libc.syscall(number, pid, other, what, ctypes.c_ulong(first), ctypes.c_ulong(second)) == 0)
