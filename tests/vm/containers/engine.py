"""Podman and the daemon as a user of this host has them, on the simulated driver."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOTFS = Path("/run/rootfs")
HERE = Path(__file__).resolve().parent
LOAD = (sys.executable, str(HERE / "load.py"))
_SIMCARD = str(HERE.parent / "guest" / "simcard.py")
_LOG = Path("/dev/log")
_TIMEOUT_S = 240  # the machine is emulated, and Python starts in seconds


def make_rootfs() -> None:
    """Give containers this host's own files, Python among them, without what is mounted in there."""
    ROOTFS.mkdir()
    subprocess.run(["mount", "--bind", "/", str(ROOTFS)], check=True)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    # Files and not pipes: what stays in the background holds them open.
    with Path("/run/engine.out").open("w+") as out:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, text=True, timeout=_TIMEOUT_S, check=False
        )
        out.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, out.read())


class Daemon:
    """qgpud on the kmod plane."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        command = [sys.executable, _SIMCARD, "--plane", "kmod"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.said = [self.process.stderr.readline()]
        while '"ready"' not in self.said[-1]:
            assert self.said[-1], f"the daemon did not start: {self.said}"
            self.said.append(self.process.stderr.readline())

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(how)
        self.process.communicate()

    def ctl(self, *arguments: str) -> dict[str, Any]:
        done = _run(sys.executable, "-m", "qgpu.cli.main", "--timeout", "60", *arguments, "-o", "json")
        assert done.returncode == 0, done.stdout
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def pods(self) -> dict[str, Any]:
        return {pod["name"]: pod for pod in self.ctl("pod", "list")["pods"]}


@contextmanager
def _system_log() -> Iterator[Callable[[], str]]:
    """Be the system's log, where the hook says why it refuses; crun throws away what it says otherwise."""
    _LOG.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(_LOG))
        log.setblocking(False)

        def said() -> str:
            lines = []
            with suppress(BlockingIOError):
                while True:
                    lines.append(log.recv(1 << 16).decode())
            return "\n".join(lines)

        yield said
    _LOG.unlink()


class Podman:
    """Podman with one of its runtimes."""

    def __init__(self, runtime: str) -> None:
        self.runtime = runtime

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return _run(
            *("podman", "--root", "/run/podman/root", "--runroot", "/run/podman/run"),
            *("--cgroup-manager", "cgroupfs", "--events-backend", "none", "--runtime", self.runtime),
            *arguments,
        )

    def run(self, name: str, *options: str, command: tuple[str, ...] = LOAD) -> subprocess.CompletedProcess[str]:
        """Start a container of pGPU 0 in the background."""
        options += ("--name", name, "--annotation", f"qgpu.io/name={name}", "--device", "qgpu.io/gpu=0")
        with _system_log() as said:
            done = self("run", "-d", "--network", "none", *options, "--rootfs", str(ROOTFS), *command)
            return subprocess.CompletedProcess(done.args, done.returncode, done.stdout + said())

    def pid(self, name: str) -> int:
        return int(self("inspect", "-f", "{{.State.Pid}}", name).stdout)

    def end(self) -> None:
        self("rm", "-f", "-t", "0", "--all")
