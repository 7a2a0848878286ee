"""Pasting a document's block into an interactive shell, whole, as a reader does.

The shell is bash on a terminal of its own. Programs of ours stand on its PATH under their own names.
"""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PATIENCE_S = 60.0
#: What the programs are in a source tree.
MODULES = {"qgpuctl": "qgpu.cli.main", "qgpud": "qgpu.daemon.main", "qgpu-load": "qgpu.load.main"}
#: bash begins its prompt with this where bracketed paste is on; what is pasted then is one text to it.
_PASTE, _PASTED = "\x1b[200~", "\x1b[201~"


class NotSeenError(Exception):
    """The terminal did not show what was expected."""


def programs(folder: Path) -> None:
    """Put our programs into a folder under their own names."""
    folder.mkdir(parents=True)
    for name, module in MODULES.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        program.chmod(0o755)


class Terminal:
    """An interactive bash on a terminal; what it showed so far is ``shown``."""

    def __init__(self, folder: Path, environment: Mapping[str, str], patience_s: float = _PATIENCE_S) -> None:
        self.shown, self._patience_s = "", patience_s
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            variables = {**environment, "TERM": "xterm", "PS1": "$ ", "COLUMNS": "120", "LINES": "40"}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], variables)
        self.until("$ ")

    def paste(self, lines: Sequence[str]) -> None:
        """Paste lines at once, and press Enter."""
        text = "\n".join(lines)
        self._write(f"{_PASTE}{text}{_PASTED}\r" if "\x1b[?2004h" in self.shown else f"{text}\n")

    def keys(self, text: str) -> None:
        """Press keys."""
        self._write(text)

    def until(self, *wanted: str, since: int = 0) -> int:
        """Read until all of ``wanted`` was shown since a position; return the position behind the last of them.

        Raises NotSeenError.
        """
        end_s = time.monotonic() + self._patience_s
        while not all(each in self.shown[since:] for each in wanted):
            ready, _, _ = select.select([self._fd], [], [], max(0.0, end_s - time.monotonic()))
            try:
                data = os.read(self._fd, 65536) if ready else b""
            except OSError:
                data = b""
            if not data:
                missing = [each for each in wanted if each not in self.shown[since:]]
                raise NotSeenError(f"{missing} not in:\n{self.shown[since:][-3000:]}")
            self.shown += data.decode(errors="replace")
        return since + max(self.shown[since:].index(each) + len(each) for each in wanted)

    def until_rows(self, *names: str, since: int) -> None:
        """Read until every name was shown on a line with a share that is not zero: until its load works."""
        rows = [re.compile(rf"{name}[^\n]*[1-9]\d*\.\d ?%") for name in names]
        while not all(row.search(self.shown, since) for row in rows):
            self.until("%", since=len(self.shown))

    def close(self) -> None:
        """Hang up, and end the shell and what it started."""
        os.close(self._fd)  # as when a window is closed: the kernel sends SIGHUP, once; a second would kill bash
        os.waitpid(self._pid, 0)  # before it has passed the first on to its jobs

    def _write(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(self._fd, data) :]


def readme(terminal: Terminal, lines: Sequence[str], end: str) -> int:
    """Paste the README's block, wait for both pods in ``top``, leave it, and end what runs with ``end``.

    Returns how many characters the end printed. Raises NotSeenError.
    """
    terminal.paste(lines)
    at = terminal.until("\x1b[?1049h")
    terminal.until_rows("train", "batch", since=at)
    terminal.keys("q")
    at = terminal.until("\x1b[?1049l", since=at)
    terminal.keys(f"{end}; wait; echo all' 'ended\n")
    return terminal.until("all ended\r\n", since=at) - at


def status(terminal: Terminal, lines: Sequence[str]) -> None:
    """Paste the block of the wheel, whose last line is ``qgpuctl status``. Raises NotSeenError."""
    terminal.paste(lines)
    at = terminal.until("plane sim")
    terminal.keys("kill %1; wait; echo all' 'ended\n")
    terminal.until("all ended\r\n", since=at)
