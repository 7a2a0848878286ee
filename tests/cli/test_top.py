"""``qgpuctl top`` at a terminal: keys do what they say, and the terminal is given back as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qgpu.errors import ExitCode
from qgpu.ipc.control_socket import Client
from tests.cli import programs
from tests.cli.programs import TIMEOUT_S, Daemon, environment
from tests.web.crowd import crowd

_SHOWN = re.compile(r"\x1b\[H(.*?)\x1b\[J", re.DOTALL)
_STYLE = re.compile(r"\x1b\[[0-9;]*[mK]")
_DOWN, _PAGE_DOWN = "\x1b[B", "\x1b[6~"


class Terminal:
    """A pseudo-terminal with ``qgpuctl top`` in it."""

    def __init__(self, daemon: Daemon, lines: int, columns: int, shell: str, more: dict[str, str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
            command = [sys.executable, "-m", "qgpu.cli.main", "--runtime-dir", str(daemon.runtime_dir)]
            command += ["top", "--every", "0.2"]
            if shell:
                command = ["/bin/bash", "--norc", "-c", shell.format(shlex.join(command))]
            os.execve(command[0], command, environment(more))
        self.attributes = termios.tcgetattr(self.fd)
        self.said = ""

    def resize(self, lines: int, columns: int) -> None:
        self.said = ""
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        self.said = ""
        os.write(self.fd, keys.encode())

    def until(self, wanted: str, *, without: str = "\0") -> list[str]:
        """Return the lines of the first whole screen that contains a text, and does not contain another."""
        while True:
            for screen in _SHOWN.findall(self.said):
                text = _STYLE.sub("", screen)
                if wanted in text and without not in text:
                    return text.split("\r\n")
            assert self.read(), self.said[-2000:]

    def end(self) -> int:
        """Wait until the program has ended and left full-screen mode, and return its exit code."""
        while "\x1b[?1049l" not in self.said:
            assert self.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def read(self) -> bool:
        ready, _, _ = select.select([self.fd], [], [], TIMEOUT_S)
        assert ready, self.said
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # its other end is closed
            return False
        self.said += data.decode(errors="ignore")
        return bool(data)


@contextmanager
def terminal(daemon: Daemon, lines: int = 24, columns: int = 80, shell: str = "", **more: str) -> Iterator[Terminal]:
    opened = Terminal(daemon, lines, columns, shell, more)
    try:
        yield opened
    finally:
        os.close(opened.fd)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Twenty pods on four pGPUs."""
    with crowd(tmp_path_factory.mktemp("crowd") / "run", 20) as daemon:
        yield daemon


def policy_of(daemon: Daemon, gpu: int) -> str:
    """Ask over the socket, which is quicker than a program."""
    with Client(daemon.runtime_dir) as client:
        return str(client.call("gpu.list")["gpus"][gpu]["policy"])


def test_top_runs_at_a_terminal_until_q(shared: Daemon) -> None:
    with terminal(shared) as top:
        assert any(line.startswith("> pGPU 0") for line in top.until("q end"))
        top.press("s")
        top.until("by share")
        top.press(" ")
        top.until("(paused)")
        top.press("q")
        code = top.end()
        restored = termios.tcgetattr(top.fd)

    assert code == ExitCode.OK
    assert restored == top.attributes


def test_the_first_pgpu_is_chosen_where_none_is_0(tmp_path: Path) -> None:
    with programs.daemon(tmp_path / "run", "--sim-mig", "2") as daemon, terminal(daemon) as top:
        top.until("> pGPU 101")
        top.press("1")
        top.until("pGPU 101: burst-share -> fixed-share?")
        top.press("y")
        top.until("pGPU 101: fixed-share")
        top.press("q")
        top.end()


def test_a_stray_digit_changes_nothing(shared: Daemon) -> None:
    with terminal(shared) as top:
        top.until("q end")
        top.press("\t")
        top.until("> pGPU 1")
        for keys in ("1", "n", "1y", "x"):  # typed ahead or pasted, the y is no answer
            top.press(keys)
            top.until("pGPU 1: burst-share -> fixed-share?" if "1" in keys else "unchanged")
            assert policy_of(shared, 1) == "burst-share"
        top.press("1")
        top.until("fixed-share?")
        top.press("y")
        top.until("pGPU 1: fixed-share")
        assert policy_of(shared, 1) == "fixed-share"
        top.press("2")
        top.until("burst-share?")
        top.press("y")
        top.until("pGPU 1: burst-share")
        assert policy_of(shared, 0) == "burst-share"
        top.press("q")
        top.end()


def test_twenty_pods_scroll_on_a_small_terminal(many: Daemon) -> None:
    with terminal(many) as top:
        screen = top.until("pods 1 to 16 of 20")
        assert len(screen) == 24
        assert not any("pod-19" in line for line in screen)
        top.press(_PAGE_DOWN + _PAGE_DOWN)
        assert any("pod-19" in line for line in top.until("of 20", without="pods 1 to"))
        top.press("\x1b[H" + _DOWN)
        assert any(line.startswith("pod-4: ") for line in top.until("pod-4: "))
        top.resize(50, 120)
        shown = "\n".join(top.until("20 pods by"))
        assert all(f" pod-{n} " in shown for n in (1, 20))
        top.press("q")
        top.end()


def test_top_survives_a_restart_of_the_daemon(tmp_path: Path) -> None:
    first = Daemon(tmp_path, "--plane", "sim")
    with terminal(first) as top:
        top.until("q end")
        first.stop()
        top.until("no answer, trying again")
        with programs.daemon(tmp_path):
            top.until("qgpud is back")
            top.until("q end", without="no answer")
            top.press("q")
            code = top.end()

    assert code == ExitCode.OK


def test_a_killed_top_gives_the_terminal_back(shared: Daemon) -> None:
    with terminal(shared) as top:
        top.until("q end")
        os.kill(top.pid, signal.SIGTERM)
        code = top.end()
        restored = termios.tcgetattr(top.fd)

    assert code == 128 + signal.SIGTERM
    assert restored == top.attributes


def test_ctrl_z_gives_the_terminal_back_meanwhile(shared: Daemon) -> None:
    with terminal(shared, shell="set -m; {}; stty -a; fg >/dev/null; echo all-over") as top:
        top.until("q end")
        top.press("\x1a")
        while " icanon" not in top.said:  # what stty found
            assert top.read()
        assert top.said.index("\x1b[?1049l") < top.said.index(" icanon")
        top.said = top.said.partition(" icanon")[2]
        top.until("q end")
        top.press("q")
        while "all-over" not in top.said:
            assert top.read()


@pytest.mark.parametrize(("setting", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_can_be_switched_off(many: Daemon, setting: dict[str, str], coloured: bool) -> None:
    with terminal(many, **setting) as top:
        top.until("pod-12")
        seen = "\x1b[36m" in top.said
        top.press("q")
        top.end()

    assert seen == coloured


def test_top_into_a_pipe_is_plain_text(shared: Daemon) -> None:
    result = shared.ctl("top", "-1", "--every", "0.2")

    assert result.returncode == ExitCode.OK
    assert "\x1b" not in result.stdout
    assert "pGPU 1 Simulated H200: burst-share" in result.stdout


def test_top_into_a_pipe_ends_quietly_by_ctrl_c(shared: Daemon) -> None:
    process = shared.start("top", "--every", "0.2")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("qgpu ")
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=TIMEOUT_S)

    assert (process.returncode, error) == (ExitCode.OK, "")
