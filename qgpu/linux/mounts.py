"""Mounts, which Python lacks: a bounded tmpfs, and a directory in another's place for one child (mount(2))."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

# include/uapi/linux/mount.h, sched.h
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_SLAVE = 2, 4, 8, 4096, 16384, 1 << 19
_MNT_DETACH = 2
_CLONE_NEWNS = 0x20000
_PAGE = 4096


def tmpfs(at: Path, size: int) -> None:
    """Make a directory a tmpfs that everybody may write, of at most ``size`` bytes, unless it is one. Raises OSError.

    It has as many files as pages at most, because an empty file takes memory of the kernel's.
    """
    at.mkdir(parents=True, exist_ok=True)
    if not os.path.ismount(at):
        options = f"size={size},nr_inodes={size // _PAGE},mode=1777".encode()
        _checked(_libc().mount(b"qgpu", os.fsencode(at), b"tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options), at)


def unmount(at: Path) -> None:
    """Take a mount away, whoever still uses it. Raises OSError."""
    if os.path.ismount(at):
        _checked(_libc().umount2(os.fsencode(at), _MNT_DETACH), at)


def seen_at(source: Path, target: Path) -> Callable[[], None]:
    """Return a ``preexec_fn`` for ``subprocess``: the child and its children see ``source`` in place of ``target``.

    Nobody else does. They go on to see what is mounted elsewhere.
    """
    libc, one, other = _libc(), os.fsencode(source), os.fsencode(target)

    def enter() -> None:
        _checked(libc.unshare(_CLONE_NEWNS), target)
        _checked(libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), target)
        _checked(libc.mount(one, other, None, _MS_BIND, None), target)

    return enter


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, at: Path) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(at))
