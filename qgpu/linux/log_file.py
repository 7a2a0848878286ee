"""A log that cannot fail: a full disk, or a reader that is gone, costs lines and nothing else."""

from __future__ import annotations

from contextlib import suppress
from typing import TextIO


class LogFile:
    """A text file to which lines are written if that works."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write a line, or leave it out."""
        with suppress(OSError, ValueError):
            return self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is left, or leave it out."""
        with suppress(OSError, ValueError):
            self._file.flush()
