"""The runtime directory: created, checked, and locked by one daemon at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from qgpu.errors import AlreadyRunningError, InvalidValueError, PermissionDeniedError

#: A socket's path has at most 107 bytes (unix(7)). The longest name in the directory is "/guardian.sock.4194304".
_LONGEST = 107 - 22


def hold(runtime_dir: Path) -> int:
    """Create the directory and lock it. The lock holds as long as the returned descriptor is open.

    Raises AlreadyRunningError, InvalidValueError, PermissionDeniedError.
    """
    if len(os.fsencode(runtime_dir.absolute())) > _LONGEST:
        raise InvalidValueError(f"{runtime_dir}: too long for sockets in it; choose another --runtime-dir")
    try:
        runtime_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        if runtime_dir.stat().st_uid != os.geteuid() or runtime_dir.lstat().st_uid not in (0, os.geteuid()):
            raise PermissionDeniedError(f"{runtime_dir}: belongs to another user; choose another --runtime-dir")
        descriptor = os.open(runtime_dir / "qgpud.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PermissionDeniedError(f"{runtime_dir}: {error.strerror}; choose another --runtime-dir") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise AlreadyRunningError(f"{runtime_dir}: another qgpud is running there; stop it first") from None
    return descriptor
