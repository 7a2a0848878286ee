"""The runtime directory: created, checked, and locked by one daemon at a time; made again if somebody removes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from qgpu.errors import AlreadyRunningError, InvalidValueError, PermissionDeniedError, QgpuError, unusable
from qgpu.linux import lock_file
from qgpu.linux.repeated_error import RepeatedError

_log = structlog.get_logger("runtime-dir")

#: A socket's path has at most 107 bytes (unix(7)). The longest name in the directory is "/guardian.sock.4194304".
_LONGEST = 107 - 22

_LOCK = "qgpud.lock"


class RuntimeDir:
    """The directory while this daemon runs. Raises what ``hold`` raises."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = hold(path)
        self._failure = RepeatedError(_log, "socket removed, no client reaches this daemon")

    def refresh(self, reachable: bool, restore: Sequence[Callable[[], None]]) -> None:
        """If clients no longer find us, make the directory again, lock it, and call what listens there."""
        if reachable:
            self._failure.text = ""
            return
        with self._failure.logged(OSError, QgpuError):
            if not self._locked():
                lock = hold(self._path)
                os.close(self._lock)
                self._lock = lock
            for each in restore:
                each()
        if not self._failure.text:
            _log.warning("socket removed: listening again", runtime_dir=str(self._path))

    def close(self) -> None:
        """Let go of the lock."""
        os.close(self._lock)

    def _locked(self) -> bool:
        """Tell whether the file that we lock is still the one in the directory."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._lock), os.stat(self._path / _LOCK))
        return False


def hold(runtime_dir: Path) -> int:
    """Create the directory and lock it. The lock holds as long as the returned descriptor is open.

    Raises AlreadyRunningError, InvalidValueError, PermissionDeniedError; QgpuError if the disk is full.
    """
    if len(os.fsencode(runtime_dir.absolute())) > _LONGEST:
        raise InvalidValueError(f"{runtime_dir}: too long for sockets in it; choose another --runtime-dir")
    try:
        runtime_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        if runtime_dir.stat().st_uid != os.geteuid() or runtime_dir.lstat().st_uid not in (0, os.geteuid()):
            raise PermissionDeniedError(f"{runtime_dir}: belongs to another user; choose another --runtime-dir")
        return lock_file.lock(runtime_dir / _LOCK)
    except BlockingIOError:
        raise AlreadyRunningError(f"{runtime_dir}: another qgpud is running there; stop it first") from None
    except OSError as error:
        raise unusable(runtime_dir, "choose another --runtime-dir", error) from error
