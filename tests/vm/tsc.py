"""How fast the host's time-stamp counter runs, which a guest's kernel is told.

A guest that measures it against its timers is wrong where the emulator waits for a CPU meanwhile. Its clock was seen
to run six times too fast then, and every time limit in it came six times too early.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import time

#: rdtsc; shl rdx, 32; or rax, rdx; ret
_RDTSC = bytes.fromhex("0f31 48c1e220 4809d0 c3")
_APART_S = 0.1


def khz() -> int | None:
    """Measure the rate in kHz; None where the CPU has no such counter."""
    if platform.machine() != "x86_64":
        return None
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(_RDTSC)
        code = (ctypes.c_char * mmap.PAGESIZE).from_buffer(page)
        read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(code))
        first = _pair(read)
        time.sleep(_APART_S)
        second = _pair(read)
        del code
    return round((second[0] - first[0]) * 1_000_000 / (second[1] - first[1]))


def _pair(read: ctypes._FuncPointer) -> tuple[int, int]:
    """Read the counter between two reads of the clock that lie close together; with the time in ns."""
    _, count, time_ns = min(_bracketed(read) for _ in range(100))
    return count, time_ns


def _bracketed(read: ctypes._FuncPointer) -> tuple[int, int, int]:
    before_ns, count, after_ns = time.monotonic_ns(), read(), time.monotonic_ns()
    return after_ns - before_ns, count, (before_ns + after_ns) // 2
