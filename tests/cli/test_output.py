"""Tables: full width for programs; on a terminal only what fits."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.cli.output import fit_table, table
from tests.cli import programs
from tests.cli.programs import LOAD, Daemon, environment

HEADER = ("POD", "PERIOD", "QUOTA", "PROBLEM")
ROWS = [("train", "100 ms", "60 %", "-"), ("chat", "100 ms", "-", "-")]
WIDTH = 80


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with a pod whose name is long."""
    with (
        programs.daemon(tmp_path_factory.mktemp("busy") / "run") as daemon,
        programs.pods(
            daemon, {"a-pod-of-somebody-with-a-long-name": ("--cores", "30", "--memory", "1GiB", "--", *LOAD)}
        ),
    ):
        yield daemon


def at_a_terminal(daemon: Daemon, *arguments: str, **more: str) -> str:
    """Return what qgpuctl writes to a terminal of 80 columns."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    command = [sys.executable, "-m", "qgpu.cli.main", "--runtime-dir", str(daemon.runtime_dir), *arguments]
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=subprocess.DEVNULL, env=environment(more)):
        os.close(its)
        written = b""
        try:
            while data := os.read(ours, 1 << 16):
                written += data
        except OSError:  # its other end is closed
            os.close(ours)
    return written.decode().replace("\r\n", "\n")


def test_a_table_that_fits_is_whole() -> None:
    assert fit_table(HEADER, ROWS, ("PERIOD",), 100) == table(HEADER, ROWS)


@pytest.mark.parametrize(
    ("width", "header"),
    [(25, "POD    PERIOD  QUOTA"), (16, "POD    QUOTA"), (8, "POD    …")],
)
def test_a_narrow_terminal_loses_what_says_least(width: int, header: str) -> None:
    assert fit_table(HEADER, ROWS, ("PERIOD",), width)[0] == header


@given(st.integers(1, 40), st.sampled_from([(), ("PERIOD",), HEADER[1:]]), st.sampled_from([ROWS, []]))
def test_a_table_fits_every_terminal(width: int, droppable: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    assert max(map(len, fit_table(HEADER, rows, droppable, width))) <= width


@pytest.mark.parametrize("arguments", [("pod", "list"), ("gpu", "list"), ("events",), ("top", "-1")])
def test_commands_fit_the_terminal_and_are_whole_elsewhere(busy: Daemon, arguments: tuple[str, ...]) -> None:
    shown, piped = at_a_terminal(busy, *arguments), busy.ctl(*arguments).stdout

    assert max(map(len, shown.splitlines())) <= WIDTH
    assert max(map(len, piped.splitlines())) > WIDTH


def test_the_tables_of_status_fit_the_terminal(busy: Daemon) -> None:
    shown = at_a_terminal(busy, "status").splitlines()
    first = next(at for at, line in enumerate(shown) if line.startswith("GPU "))

    assert max(map(len, shown[first:])) <= WIDTH


def test_a_terminal_without_cursor_gets_plain_tables(busy: Daemon) -> None:
    assert "\x1b" not in at_a_terminal(busy, "top", "--once", TERM="dumb")
