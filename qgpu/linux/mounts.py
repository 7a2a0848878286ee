"""Mounts, which Python lacks: a bounded tmpfs, and a directory in another's place for one child (mount(2)).

``python -m qgpu.linux.mounts SOURCE TARGET COMMAND...`` executes a command that sees SOURCE in place of TARGET.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from qgpu.linux.interpreter import python

# include/uapi/linux/mount.h, sched.h
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_NOSYMFOLLOW, _MS_BIND, _MS_REC, _MS_SLAVE = 2, 4, 8, 256, 4096, 16384, 1 << 19
_SAFELY = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | _MS_NOSYMFOLLOW
_MNT_DETACH = 2
_CLONE_NEWNS = 0x20000
_PAGE = 4096


def tmpfs(at: Path, size: int) -> None:
    """Make a directory a tmpfs that everybody may write, of at most ``size`` bytes, unless it is one. Raises OSError.

    It has as many files as pages at most, because an empty file takes memory of the kernel's. Nobody follows a symbolic
    link in it: root's programs use it, too. Kernels before 5.10 ignore that.
    """
    at.mkdir(parents=True, exist_ok=True)
    if not os.path.ismount(at):
        options = f"size={size},nr_inodes={size // _PAGE},mode=1777".encode()
        _checked(_libc().mount(b"qgpu", os.fsencode(at), b"tmpfs", _SAFELY, options), at)


def unmount(at: Path) -> None:
    """Take a mount away, whoever still uses it. Raises OSError."""
    if os.path.ismount(at):
        _checked(_libc().umount2(os.fsencode(at), _MNT_DETACH), at)


def seen_at(source: Path, target: Path) -> list[str]:
    """Return what to put before a child's command: the child and its children see ``source`` in place of ``target``.

    Nobody else does. They go on to see what is mounted elsewhere.
    """
    return python("-m", __name__, str(source), str(target))


def _see(source: bytes, target: bytes) -> None:
    libc = _libc()
    _checked(libc.unshare(_CLONE_NEWNS), target)
    _checked(libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), target)
    _checked(libc.mount(source, target, None, _MS_BIND, None), target)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, at: Path | bytes) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fsdecode(at))


if __name__ == "__main__":
    _see(os.fsencode(sys.argv[1]), os.fsencode(sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])  # noqa: S606
