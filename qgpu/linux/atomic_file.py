"""Files that are replaced whole or not at all: a crash, or a disk that is full, at any moment leaves what was there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """Give a file to write to, which takes the place of ``path`` when the block ends, and goes if that fails.

    It has this ``mode``, or that of the file it replaces. What is no file, such as /dev/stdout, is written to as it is.
    Raises OSError, before the block where nothing can be written there at all.
    """
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
    _sync(place.parent)


def replace(path: Path, text: str, mode: int | None = None) -> None:
    """Put ``text`` in the place of a file. Raises OSError."""
    with replacing(path, mode) as file:
        file.write(text.encode())


def _sync(directory: Path) -> None:
    """Write a directory down, so that what was renamed in it has its new name after a crash too."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
