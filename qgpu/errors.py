"""The errors that qgpu raises, each with its exit code of ``qgpuctl`` and ``qgpud``.

Codes equal NVML's return values (nvmlReturn_t) where the meanings agree; others start at 20. A message is one line
with what is wrong, where, and the remedy.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit codes of the command line. ``qgpuctl run`` returns its command's exit code instead."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    NOT_LOADED = 9
    TIMEOUT = 10
    GPU_LOST = 15
    DAEMON_UNREACHABLE = 20
    REFUSED = 21
    DRIFT = 22
    ALREADY_RUNNING = 23
    INTERRUPTED = 130
    BROKEN_PIPE = 141


class QgpuError(Exception):
    """A request cannot be done; ``str()`` is one line for people."""

    code = ExitCode.FAILED


class InvalidValueError(QgpuError, ValueError):
    """A value is out of its bounds."""

    code = ExitCode.USAGE


class ConfigError(QgpuError):
    """The configuration file has an error; none of it was applied."""

    code = ExitCode.USAGE


class NotSupportedError(QgpuError):
    """qgpu cannot enforce here: the driver, kernel or card lacks support."""

    code = ExitCode.NOT_SUPPORTED


class PermissionDeniedError(QgpuError):
    """The caller may not do this."""

    code = ExitCode.NO_PERMISSION


class UnknownNameError(QgpuError):
    """No pod, pGPU or policy has that name."""

    code = ExitCode.NOT_FOUND


class NoGpuError(QgpuError):
    """The NVIDIA driver is not loaded or shows no GPU."""

    code = ExitCode.NOT_LOADED


class TimedOutError(QgpuError):
    """No answer in time."""

    code = ExitCode.TIMEOUT


class DaemonUnreachableError(QgpuError):
    """qgpud does not answer."""

    code = ExitCode.DAEMON_UNREACHABLE


class RefusedError(QgpuError):
    """A grant does not fit, or cannot be enforced; nothing was changed."""

    code = ExitCode.REFUSED


class AlreadyRunningError(QgpuError):
    """Another qgpud holds this runtime directory."""

    code = ExitCode.ALREADY_RUNNING


class BackendGoneError(QgpuError):
    """The data plane does not answer any more."""

    code = ExitCode.GPU_LOST


class CheckpointError(QgpuError):
    """The driver did not take a process off its card, or did not put it back."""


class RmError(QgpuError):
    """RM answered a call with a status other than NV_OK."""

    def __init__(self, what: str, status: int) -> None:
        super().__init__(f"{what}: RM status {status:#x}")
        self.status = status


def full(error: OSError) -> bool:
    """Tell whether an error means that a disk, or a quota on it, is full; a later try may succeed."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def unusable(path: Path, remedy: str, error: OSError) -> QgpuError:
    """Return the error that a file or directory cannot be used, with this remedy unless the disk is full."""
    if full(error):
        return QgpuError(f"{path}: {error.strerror}; free some space there")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PermissionDeniedError(f"{path}: {error.strerror}; {remedy}")
    # for a path that is too long for a socket, Python raises an error without errno
    if error.errno not in (None, errno.EEXIST, errno.ENOTDIR, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG):
        return QgpuError(f"{path}: {error.strerror or error}; {remedy}")
    # a file is where a directory should be
    why = os.strerror(errno.ENOTDIR) if error.errno == errno.EEXIST else error.strerror or error
    return InvalidValueError(f"{path}: {why}; {remedy}")


def no_pod(name: str) -> UnknownNameError:
    """Return the error that no pod has this name."""
    return UnknownNameError(f"pod {name}: there is none of that name; see: qgpuctl pod list")


def no_pgpu(index: int, known: Iterable[int]) -> UnknownNameError:
    """Return the error that no pGPU has this number, with the numbers that exist."""
    numbers = ", ".join(map(str, known)) or "none"
    return UnknownNameError(f"pGPU {index}: there is none of that number; there are: {numbers}")


def from_code(code: int, message: str) -> QgpuError:
    """Rebuild an error that another qgpu process reported by exit code and message."""
    for kind in QgpuError.__subclasses__():
        if kind.code == code and kind is not RmError:
            return kind(message)
    return QgpuError(message)
