"""The terminal in full-screen mode: drawing, single key presses, changes of its size, and restoring it at the end."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Sequence

from qgpu.cli.styled_text import Line, Style

_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW, _PLAIN = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[0m"

#: Serial lines and some programs' terminals say 0 by 0.
_COMMON = 80, 24

#: The eight colours of any terminal, so that they follow its theme.
_SGR = {
    Style.PLAIN: "",
    Style.HEADING: "1",
    Style.QUIET: "2",
    Style.ONLINE: "36",
    Style.GOOD: "32",
    Style.NOTED: "33",
    Style.BAD: "1;31",
    Style.CHOSEN: "7",
    Style.QUESTION: "1;7",
}
#: Where colours are not wanted (https://no-color.org), what must stand out still does.
_COLOURLESS = {Style.HEADING: "1", Style.BAD: "1", Style.CHOSEN: "7", Style.QUESTION: "7"}

#: What terminals send for keys: an escape sequence, or a character.
_KEY = re.compile(r"\x1b[\[O][0-9;?]*[A-Za-z~]|.", re.DOTALL)
_NAMES = {
    "A": "up", "B": "down", "H": "home", "F": "end",
    "5~": "pgup", "6~": "pgdn", "1~": "home", "4~": "end", "7~": "home", "8~": "end",
}  # fmt: skip


class Screen:
    """The controlling terminal, in full-screen mode inside ``with``."""

    def __enter__(self) -> Screen:
        self._sgr = _COLOURLESS if os.environ.get("NO_COLOR") else _SGR
        self._as_found = termios.tcgetattr(sys.stdin)
        self._resized, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._woken = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        wanted: dict[signal.Signals, Callable[[int, object], None]] = {
            signal.SIGWINCH: lambda *_: None,
            signal.SIGTERM: lambda number, _: sys.exit(128 + number),
            signal.SIGTSTP: self._suspend,
        }
        self._handlers = {number: signal.signal(number, handler) for number, handler in wanted.items()}
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._woken)
        os.close(self._resized)
        os.close(self._wakeup)

    @property
    def size(self) -> tuple[int, int]:
        """Return the number of characters in a line, and of lines; a common one where the terminal knows none."""
        found = os.get_terminal_size(sys.stdout.fileno())
        return found.columns or _COMMON[0], found.lines or _COMMON[1]

    def draw(self, lines: Sequence[Line]) -> None:
        """Replace the screen's content."""
        body = "\r\n".join("".join(self._painted(*piece) for piece in each) + _CLEAR_LINE for each in lines)
        sys.stdout.write(_HOME + body + _CLEAR_BELOW)
        sys.stdout.flush()

    def keys(self, seconds: float) -> list[str]:
        """Wait up to ``seconds`` for keys and return the names of those pressed.

        The end of input counts as q, and a new size of the terminal as the key ``resize``.
        """
        ready, _, _ = select.select([sys.stdin, self._resized], [], [], max(0.0, seconds))
        if self._resized in ready:
            os.read(self._resized, 64)
            return ["resize"]
        if not ready:
            return []
        return [named(key) for key in _KEY.findall(os.read(sys.stdin.fileno(), 1024).decode(errors="ignore"))] or ["q"]

    def _take(self) -> None:
        tty.setcbreak(sys.stdin)
        sys.stdout.write(_ENTER)

    def _give_back(self) -> None:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._as_found)

    def _suspend(self, number: int, _: object) -> None:
        """Stop as Ctrl-Z wants it, and take the terminal again when continued; the wakeup has it redrawn."""
        self._give_back()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self._suspend)
        self._take()

    def _painted(self, text: str, style: Style) -> str:
        look = self._sgr.get(style, "")
        return f"\x1b[{look}m{text}{_PLAIN}" if look else text


def named(key: str) -> str:
    """Return a key's name. An unknown escape sequence is no key: nothing in it counts as pressed."""
    if len(key) == 1:
        return key
    return _NAMES.get(key[2:], "")
