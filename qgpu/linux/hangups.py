"""SIGHUP, which comes when a terminal is closed and, from people, to ask a daemon to read its configuration again."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


class Hangups:
    """Notes SIGHUP. A handler only sets a flag, because it may interrupt code that holds a lock."""

    def __init__(self) -> None:
        self._came = self._ever = False
        self._had_terminal = _has_terminal()
        signal.signal(signal.SIGHUP, self._note)

    def came(self) -> bool:
        """Tell whether the signal has come since the last call."""
        came, self._came = self._came, False
        return came

    @property
    def terminal_closed(self) -> bool:
        """Tell whether the signal came because the terminal of our start was closed.

        A shell that ends sends the signal while the terminal is still there.
        """
        return self._ever and self._had_terminal and not _has_terminal()

    def _note(self, *_: object) -> None:
        self._came = self._ever = True


def _has_terminal() -> bool:
    with suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
        return True
    return False
