"""The programs as a user starts them: real processes, real sockets, on the simulator."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMEOUT_S = 60
#: A load that works until it is ended.
LOAD = (sys.executable, "-m", "qgpu.load.main", "--duration", "0s")


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without what would lead a program to another daemon."""
    return {name: value for name, value in os.environ.items() if not name.startswith("QGPU_")} | dict(more or {})


class Daemon:
    """A qgpud of the test's own, and ``qgpuctl`` for it."""

    def __init__(
        self,
        runtime_dir: Path,
        *options: str,
        more: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "qgpu.daemon.main"),
    ) -> None:
        self.runtime_dir = runtime_dir
        # a file: a daemon that lives for many tests fills a pipe that nobody reads, and stands still
        self._log = tempfile.NamedTemporaryFile("w+", prefix="qgpud-", suffix=".log")  # noqa: SIM115 - closed in stop()
        self._said = Path(self._log.name).open()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *program, "--runtime-dir", str(runtime_dir), *options],
            stderr=self._log,
            env=environment(more),
        )
        self.first_line = self.line()

    def line(self) -> str:
        """Wait for the next line of the log; empty if the daemon has ended without another."""
        found = ""
        while not found.endswith("\n"):
            over = self.process.poll() is not None
            found += (more := self._said.readline())
            if over and not more:
                break
            if not more:
                time.sleep(0.01)
        return found

    def ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run qgpuctl and return how it ended."""
        return qgpuctl(self.runtime_dir, *arguments)

    def json(self, *arguments: str) -> dict[str, Any]:
        """Run qgpuctl with ``-o json`` and return what it printed."""
        result = self.ctl(*arguments, "-o", "json")
        assert result.returncode == 0, result.stderr
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start qgpuctl and leave it running."""
        return subprocess.Popen(
            [sys.executable, "-m", "qgpu.cli.main", "--runtime-dir", str(self.runtime_dir), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End the daemon and return its exit code."""
        self.process.send_signal(number)
        self.process.wait(TIMEOUT_S)
        self._said.close()
        self._log.close()
        return self.process.returncode


@contextmanager
def daemon(runtime_dir: Path, *options: str, more: Mapping[str, str] | None = None) -> Iterator[Daemon]:
    """Run a daemon on the simulator, with ``more`` in its environment, for as long as the context lasts."""
    running = Daemon(runtime_dir, "--plane", "sim", *options, more=more)
    try:
        yield running
    finally:
        running.stop()


@contextmanager
def pods(daemon: Daemon, commands: Mapping[str, Sequence[str]], *, busy: bool = True) -> Iterator[None]:
    """Run pods by name, with these arguments of ``qgpuctl run``, until the context ends. At first all are ``busy``."""
    started = [daemon.start("run", "--name", name, *arguments) for name, arguments in commands.items()]
    try:
        while commands.keys() - {
            pod["name"] for pod in daemon.json("pod", "list")["pods"] if pod["usage"][0]["busy"] or not busy
        }:
            pass
        yield
    finally:
        for pod in started:
            pod.send_signal(signal.SIGTERM)
            pod.communicate(timeout=TIMEOUT_S)


def qgpuctl_in_shell(runtime_dir: Path, arguments: str) -> subprocess.CompletedProcess[str]:
    """Run qgpuctl with what a shell makes of its arguments, and return how it ended."""
    program = shlex.join([sys.executable, "-m", "qgpu.cli.main", "--runtime-dir", str(runtime_dir)])
    return subprocess.run(
        ["sh", "-c", f"{program} {arguments}"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(),
        check=False,
    )


def completed(daemon: Daemon, line: str) -> list[str]:
    """Return what bash is offered at the end of a line."""
    words = line.split(" ")
    result = subprocess.run(
        [sys.executable, "-m", "qgpu.cli.main"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(
            {
                "_QGPUCTL_COMPLETE": "bash_complete",
                "COMP_WORDS": line,
                "COMP_CWORD": str(len(words) - 1),
                "QGPU_RUNTIME_DIR": str(daemon.runtime_dir),
            }
        ),
    )
    assert result.stderr == ""
    return [each.partition(",")[2] for each in result.stdout.split()]


def qgpuctl(runtime_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run qgpuctl and return how it ended."""
    return run("qgpu.cli.main", "--runtime-dir", str(runtime_dir), *arguments)


def qgpud(*arguments: str, user: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run qgpud where it is expected to end by itself."""
    return run("qgpu.daemon.main", *arguments, user=user)


def run(module: str, *arguments: str, user: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of our programs to its end."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(),
        user=user,
        check=False,
    )
