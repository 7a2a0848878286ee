"""The terminal while a command has it to itself: a screen to draw on, keys as they are pressed, and all put back."""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import tty

_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class Screen:
    """The controlling terminal, taken from ``with`` to its end."""

    def __enter__(self) -> Screen:
        self._as_found = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)
        sys.stdout.write(_ENTER)
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._as_found)

    @property
    def width(self) -> int:
        """Return how many characters a line has."""
        return shutil.get_terminal_size().columns

    def draw(self, lines: list[str]) -> None:
        """Replace what is on the screen; what does not fit below is left out."""
        height = shutil.get_terminal_size().lines
        body = "\r\n".join(line + _CLEAR_LINE for line in lines[:height])
        sys.stdout.write(_HOME + body + _CLEAR_BELOW)
        sys.stdout.flush()

    def keys(self, seconds: float) -> list[str]:
        """Return the keys that were pressed, or none after so many seconds; the end of input counts as q."""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        if not ready:
            return []
        return list(os.read(sys.stdin.fileno(), 64).decode(errors="ignore")) or ["q"]
