"""A log that never fails: with a full disk, or without a reader, it loses lines only."""

from __future__ import annotations

from contextlib import suppress
from typing import TextIO


class LogFile:
    """A text file that ignores write errors."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write a line, or lose it."""
        with suppress(OSError, ValueError):
            return self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or lose what is left."""
        with suppress(OSError, ValueError):
            self._file.flush()
