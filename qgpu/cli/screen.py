"""The terminal in full-screen mode: drawing, single key presses, and restoring it at the end."""

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
    """The controlling terminal, in full-screen mode inside ``with``."""

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
        """Return the number of characters in a line."""
        return shutil.get_terminal_size().columns

    def draw(self, lines: list[str]) -> None:
        """Replace the screen's content; lines that do not fit are cut off."""
        height = shutil.get_terminal_size().lines
        body = "\r\n".join(line + _CLEAR_LINE for line in lines[:height])
        sys.stdout.write(_HOME + body + _CLEAR_BELOW)
        sys.stdout.flush()

    def keys(self, seconds: float) -> list[str]:
        """Wait up to ``seconds`` for keys and return those pressed; the end of input counts as q."""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        if not ready:
            return []
        return list(os.read(sys.stdin.fileno(), 64).decode(errors="ignore")) or ["q"]
