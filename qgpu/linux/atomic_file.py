"""Files that are replaced as a whole: after a crash or a full disk, either the old or the new content is there."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """Open a new file that replaces ``path`` when the block ends, and is removed if the block fails.

    It gets this ``mode``, or the mode of the file it replaces. A path that is no regular file, such as /dev/stdout, is
    written directly. Raises OSError, before the block if nothing can be written there at all, also for another user's
    symbolic link in a directory such as /tmp, as the kernel does (protected_symlinks in proc(5)).
    """
    if path.is_symlink() and _is_strangers(path):
        raise PermissionError(errno.EACCES, "a symbolic link of another user")
    if path.exists() and not path.is_file():
        with path.open("wb") as there:
            yield there
        return
    place = Path(os.path.realpath(path))
    new = place.with_name(f".{place.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    if mode is None and place.exists():
        mode = stat.S_IMODE(place.stat().st_mode)
    try:
        with new.open("xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.rename(place)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise
    flush(place.parent)


def _is_strangers(link: Path) -> bool:
    """Tell whether a link belongs neither to us nor to the owner of its directory, which is sticky."""
    directory = link.parent.stat()
    return bool(directory.st_mode & stat.S_ISVTX) and link.lstat().st_uid not in (os.geteuid(), directory.st_uid)


def replace(path: Path, text: str, mode: int | None = None) -> None:
    """Replace a file's content by ``text``. Raises OSError."""
    with replacing(path, mode) as file:
        file.write(text.encode())


@contextmanager
def beside(path: Path, text: str, mode: int) -> Iterator[Path]:
    """Write and flush a file that the block may rename to ``path``; otherwise it is removed when the block ends.

    So what takes long comes before the rename, and several threads may do it at once. Raises OSError.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}")
    new.unlink(missing_ok=True)
    try:
        with new.open("xb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        yield new
    finally:
        with suppress(OSError):
            new.unlink()


def flush(directory: Path) -> None:
    """Flush a directory, so that a rename or removal in it survives a crash. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
