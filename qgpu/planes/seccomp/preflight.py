"""Checks the machine before the plane starts: the kernel permits what it needs, and no other daemon has the GPUs."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from qgpu.errors import AlreadyRunningError, NotSupportedError, PermissionDeniedError
from qgpu.linux import cgroup

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_NOBODY_MAY_TRACE = "3"


def check_kernel(yama: Path = _YAMA) -> None:
    """Check that we may access pods' processes. Raises NotSupportedError.

    With Yama at 3, not even root may access another process's memory and descriptors (Documentation/LSM/Yama.rst).
    """
    if yama.exists() and yama.read_text().strip() == _NOBODY_MAY_TRACE:
        raise NotSupportedError(
            f"{yama} is 3: no process may access another's memory, so no pod's limit could be enforced; "
            "boot with it at 2 or less, or load qgpu.ko"
        )


def lock_host() -> int:
    """Lock this machine's cards: two daemons would each grant all of them. Raises AlreadyRunningError.

    The lock is on a cgroup, which daemons share whatever their runtime directories and mount namespaces. Only root can
    open that cgroup; otherwise anybody could hold the lock.
    """
    directory = cgroup.mount() / cgroup.LOCK.lstrip("/")
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fchmod(fd, 0o700)
    except OSError as error:
        raise PermissionDeniedError(f"{directory}: {error.strerror}; run as root") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise AlreadyRunningError("another qgpud shares this machine's GPUs already; stop it first") from error
    return fd
