"""Tells whether a killed process has done all that it ever will, although it has not ended.

SIGKILL does not end a thread's wait for a FUSE server, nor a read of /proc/PID/mem that waits for a page of a file.
Until the server answers, the process keeps its descriptors and locks. What follows from that is left to others.
"""

from __future__ import annotations

import platform
import signal

from qgpu.linux import proc

#: Where a thread waits for a FUSE server, whatever signals come, or a function that this is inlined in (fs/fuse/dev.c).
FUSE_WAITS = ("request_wait_answer", "__fuse_", "fuse_")
#: The number of pread64 (asm/unistd.h), which reads /proc/PID/mem: the kernel waits for pages there whatever signals
#: come (mm/memory.c: access_remote_vm), each version in a function of another name.
_PREAD = {"x86_64": "17", "aarch64": "67"}.get(platform.machine())
#: In /proc/PID/stat from the state on: the thread's flags, of which this one marks a thread that is ending.
_FLAGS_AT, _PF_EXITING = 6, 0x4
_SIGKILL = 1 << (signal.SIGKILL - 1)


def is_over(pid: int) -> bool:
    """Tell whether each thread of a process has ended, or was killed in a wait for a FUSE server or for a page."""
    try:
        return all(_is_over(pid, tid) for tid in proc.threads(pid))
    except OSError:  # it has just ended, or we could not look
        return False


def _is_over(pid: int, tid: int) -> bool:
    fields = proc.stat(pid, tid)
    if not fields or fields[0] in "ZX":
        return True
    (pending,) = proc.status(tid, "SigPnd") or ["0"]
    killed = int(fields[_FLAGS_AT]) & _PF_EXITING or int(pending, 16) & _SIGKILL
    return bool(killed) and (proc.wchan(pid, tid).startswith(FUSE_WAITS) or proc.syscall(pid, tid)[:1] == [_PREAD])
