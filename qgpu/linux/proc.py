"""What /proc shows of processes and threads, read so that a process cannot mislead us.

A process chooses its own name and the names of the files it maps, in any bytes but a newline. So these are read as
bytes and split only where the kernel ends a line. A process that has ended yields nothing. Its files may be on a server
that does not answer, or on its own FUSE, so only the kernel is asked what they are. OSError means that we could not
look, for example without a free descriptor; it does not mean that the process has ended.
"""

from __future__ import annotations

import os
import platform
import stat as mode
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

from cffi import FFI

# linux/stat.h, linux/fcntl.h: statx(2) returns what is cached and asks no server
_SYS_STATX = {"x86_64": 332, "aarch64": 291}.get(platform.machine(), -1)
_AT_FDCWD, _AT_EMPTY_PATH, _AT_STATX_DONT_SYNC, _STATX_TYPE = -100, 0x1000, 0x4000, 0x1
_STATX_BYTES, _MODE_AND_RDEV = 256, struct.Struct("<28xH98xII")
# Each call of a pod asks for a device, and ctypes takes half as long again.
_ffi: Any = FFI()
_ffi.cdef("long syscall(long number, int at, const char *path, int flags, unsigned int mask, void *statx);")
_syscall = _ffi.dlopen(None).syscall
_READ_BYTES = 1 << 16
#: Where ``stat`` has the number of threads, and when the process or thread started, in clock ticks since boot.
_THREADS, _STARTED = 17, 19

#: Errors for a process that has ended, or that we may not look at.
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


def status(pid: int, key: str) -> list[str]:
    """Return the words behind ``key`` in /proc/PID/status, also of a thread; none without such a line."""
    wanted = key.encode() + b":"
    for line in _read(pid, "status").split(b"\n"):
        if line.startswith(wanted):
            return line.decode("ascii").split()[1:]
    return []


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process's threads, in s; to a clock tick, which is 10 ms on most kernels."""
    try:
        fields = stat(pid)
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def stat(pid: int, tid: int | None = None) -> list[str]:
    """Return the fields of /proc/PID/stat, or of one thread's, from the state on, which follows the name."""
    content = _read(pid, "stat" if tid is None else f"task/{tid}/stat")
    return content.rpartition(b")")[2].decode("ascii").split()


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot, which tells it from another of its pid.

    Empty if it has ended with all of its threads. Raises OSError.
    """
    fields = stat(pid)
    return fields[_STARTED] if fields and (fields[0] not in "ZX" or _has_threads(pid)) else ""


def clock_ticks() -> int:
    """Return the time in the unit of ``start_time``."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK") // 10**9


def cmdline(pid: int) -> list[bytes]:
    """Return the words of a process's command line; the process itself can change them."""
    return _read(pid, "cmdline").split(b"\0")[:-1]


def name(pid: int) -> str:
    """Return a process's printable name; empty if it has ended."""
    return printable(_read(pid, "comm").rstrip(b"\n"))


def printable(text: bytes) -> str:
    """Return foreign text with a question mark for each byte that a terminal might interpret."""
    return "".join(chr(byte) if 0x20 <= byte < 0x7F else "?" for byte in text)


def maps(pid: int) -> Iterator[bytes] | None:
    """Return the lines of /proc/PID/maps; None if the process runs and does not show them.

    They are those of any thread: when the first one has ended before the others, it has none. They are read as they are
    asked for: a process can map a million files, each with a name of some thousand characters.
    """
    if (lines := _lines(pid, "maps")) is not None:
        return lines
    with suppress(*_GONE):
        for thread in os.listdir(f"/proc/{pid}/task"):
            if (lines := _lines(pid, f"task/{thread}/maps")) is not None:
                return lines
    return None if _has_threads(pid) else iter(())


def _lines(pid: int, name: str) -> Iterator[bytes] | None:
    """Return the lines of a file, read as they are asked for; None if it is empty. Raises OSError."""
    parts = _parts(pid, name)
    first = next(parts, None)
    return _split(chain([first], parts)) if first is not None else None


def _split(parts: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from lines


def is_headless(pid: int) -> bool:
    """Tell whether a process's first thread has ended before others: nothing of its memory and files shows then."""
    return stat(pid)[:1] == ["Z"] and _has_threads(pid)


def _has_threads(pid: int) -> bool:
    """Tell whether a process has threads besides its first one."""
    fields = stat(pid)
    return bool(fields) and int(fields[_THREADS]) > 1


def syscall(pid: int, tid: int) -> list[str]:
    """Return the words of /proc/PID/task/TID/syscall; none if the thread has ended."""
    return _read(pid, f"task/{tid}/syscall").decode("ascii").split()


def threads(pid: int) -> set[int]:
    """Return the numbers of a process's threads. Raises OSError."""
    return {int(name) for name in os.listdir(f"/proc/{pid}/task")}


def wchan(pid: int, tid: int) -> str:
    """Return the kernel function in which a thread waits; empty if it has ended."""
    return _read(pid, f"task/{tid}/wchan").decode("ascii")


def _read(pid: int, name: str) -> bytes:
    return b"".join(_parts(pid, name))


def _parts(pid: int, name: str) -> Iterator[bytes]:
    with suppress(*_GONE):
        fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)  # pods wait: a file object takes twice as long
        try:
            while part := os.read(fd, _READ_BYTES):
                yield part
        finally:
            os.close(fd)


def device(pid: int, fd: int) -> int | None:
    """Return the number of the character device behind a process's descriptor; None for anything else."""
    return _device(_AT_FDCWD, f"/proc/{pid}/fd/{fd}".encode(), _AT_STATX_DONT_SYNC)


def device_of(fd: int) -> int | None:
    """Do as device, for a descriptor of our own."""
    return _device(fd, b"", _AT_STATX_DONT_SYNC | _AT_EMPTY_PATH)


def devices(pid: int, most: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield a process's descriptors of character devices with their numbers, among the first ``most`` only."""
    with suppress(*_GONE), os.scandir(f"/proc/{pid}/fd") as entries:
        for number, entry in enumerate(entries):
            if most is not None and number >= most:
                return
            if (found := device(pid, int(entry.name))) is not None:
                yield int(entry.name), found


def _device(at: int, path: bytes, flags: int) -> int | None:
    buffer = bytearray(_STATX_BYTES)
    if _syscall(_SYS_STATX, at, path, flags, _STATX_TYPE, _ffi.from_buffer(buffer)) < 0:
        return None
    kind, major, minor = _MODE_AND_RDEV.unpack_from(buffer)
    return os.makedev(major, minor) if mode.S_ISCHR(kind) else None
