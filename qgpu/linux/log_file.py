"""A log that never fails: with a full disk, or without a reader, it loses lines only. It may be bounded."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TextIO


class LogFile:
    """A text file that ignores write errors. A regular file longer than ``most_bytes`` is emptied first, if given."""

    def __init__(self, file: TextIO, most_bytes: int | None = None) -> None:
        self._file = file
        self._most_bytes = most_bytes

    def write(self, text: str) -> int:
        """Write a line, or lose it."""
        with suppress(OSError, ValueError):
            self._empty_if_long()
            return self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or lose what is left."""
        with suppress(OSError, ValueError):
            self._file.flush()

    def _empty_if_long(self) -> None:
        if self._most_bytes is None:
            return
        about = os.fstat(self._file.fileno())
        if stat.S_ISREG(about.st_mode) and about.st_size > self._most_bytes:
            os.ftruncate(self._file.fileno(), 0)
