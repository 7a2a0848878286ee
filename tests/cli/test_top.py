"""``qgpuctl top`` at a terminal: keys do what they say, and the terminal is given back as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from qgpu.cli.top_page import Mode, page, pressed
from qgpu.errors import ExitCode
from tests.cli.programs import TIMEOUT_S, Daemon, environment

_SHOWN = re.compile(r"\x1b\[H(.*?)\x1b\[J", re.DOTALL)


def row(pod: str, share: float, held: int, quota: int | None = None, **more: Any) -> dict[str, Any]:
    return {"gpu": 0, "pod": pod, "class": "offline", "cores": quota, "share": share, "held": held, "memory": None,
            "busy": True} | more  # fmt: skip


NOW = {
    "version": "1",
    "plane": "sim",
    "policies": {"best-effort": 0, "fixed-share": 1, "burst-share": 2},
    "gpus": [
        {"index": n, "name": "H200", "policy": "burst-share", "online_policy": "best-effort", "period_ns": 10**8,
         "trouble": ""} for n in (0, 1)
    ],
}  # fmt: skip
ROWS = [row("a", 0.2, 5, 30), row("b", 0.5, 1, 20), row("c", 0.1, 9, **{"class": "online"})]


def pods(mode: Mode) -> str:
    lines = page(mode, NOW, ROWS)
    return "".join(line.split()[1] for line in lines[lines.index("") + 2 :])


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ("", "abc"),
        ("s", "bac"),
        ("ss", "abc"),
        ("sss", "cab"),
        ("ssss", "abc"),
        ("sr", "cab"),
        ("c", "c"),
        ("cc", "ab"),
    ],
)
def test_keys_sort_reverse_and_choose(keys: str, shown: str) -> None:
    mode = Mode()
    for key in keys:
        mode, _ = pressed(mode, key, NOW)

    assert pods(mode) == shown


@pytest.mark.parametrize(
    ("keys", "gpu", "policy"), [("1", 0, "fixed-share"), ("\t2", 1, "burst-share"), ("\t\t0", 0, "best-effort")]
)
def test_a_digit_asks_for_a_policy_of_the_chosen_pgpu(keys: str, gpu: int, policy: str) -> None:
    mode, asked = Mode(), None
    for key in keys:
        mode, asked = pressed(mode, key, NOW)

    assert (mode.gpu, asked) == (gpu, policy)


def test_a_page_is_never_wider_than_the_terminal() -> None:
    mode, _ = pressed(Mode(), "?", NOW)

    assert max(map(len, page(mode, NOW, ROWS, width=40, interactive=True))) == 40


class Terminal:
    """A pseudo-terminal with ``qgpuctl top`` in it."""

    def __init__(self, daemon: Daemon) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            command = [sys.executable, "-m", "qgpu.cli.main", "--runtime-dir", str(daemon.runtime_dir)]
            os.execve(sys.executable, [*command, "top", "--every", "0.2"], environment())
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 110, 0, 0))
        self.attributes = termios.tcgetattr(self.fd)
        self.said = ""

    def press(self, keys: str) -> None:
        self.said = ""
        os.write(self.fd, keys.encode())

    def until(self, wanted: str) -> str:
        """Return the first whole screen that contains a text."""
        while True:
            if found := [screen for screen in _SHOWN.findall(self.said) if wanted in screen]:
                return found[0]
            self.read()

    def read(self) -> bool:
        ready, _, _ = select.select([self.fd], [], [], TIMEOUT_S)
        assert ready, self.said
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # its other end is closed
            return False
        self.said += data.decode()
        return bool(data)


@contextmanager
def terminal(daemon: Daemon) -> Iterator[Terminal]:
    opened = Terminal(daemon)
    try:
        yield opened
    finally:
        os.close(opened.fd)


def test_top_runs_at_a_terminal_until_q(shared: Daemon) -> None:
    with terminal(shared) as top:
        assert "> pGPU 0" in top.until("q end")
        top.press("s")
        assert "sorted by share" in top.until("sorted by")
        top.press("\t1")
        assert "> pGPU 1" in top.until("pGPU 1: fixed-share")
        top.press("2")
        top.until("pGPU 1: burst-share")
        top.press(" ")
        assert "(paused)" in top.until("paused")
        top.press("q")
        while "\x1b[?1049l" not in top.said:
            assert top.read()
        _, status = os.waitpid(top.pid, 0)
        restored = termios.tcgetattr(top.fd)

    assert os.waitstatus_to_exitcode(status) == ExitCode.OK
    assert restored == top.attributes


def test_top_into_a_pipe_is_plain_text(shared: Daemon) -> None:
    result = shared.ctl("top", "-1", "--every", "0.2")

    assert result.returncode == ExitCode.OK
    assert "\x1b" not in result.stdout
    assert "pGPU 1 Simulated H200: burst-share" in result.stdout
