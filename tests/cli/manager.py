"""A service manager as a daemon sees one: hears its notifications, and keeps its descriptors for the next daemon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.cli.programs import TIMEOUT_S, environment


class Manager:
    """Starts daemons one after the other, as systemd restarts a service."""

    def __init__(
        self, directory: Path, plane: str = "sim", prefix: tuple[str, ...] = (), options: tuple[str, ...] = ()
    ) -> None:
        self._program = [*prefix, sys.executable, "-m", "qgpu.daemon.main", "--plane", plane, *options]
        self.runtime_dir = directory / "run"
        self.state_dir = directory / "state"
        self.stored: dict[str, int] = {}
        self._address = str(directory / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._address)
        self._socket.settimeout(TIMEOUT_S)

    def start(self) -> subprocess.Popen[bytes]:
        """Start a daemon with what is stored, and return when it is ready."""
        self.listen()  # what the last one said before it ended
        self._socket.settimeout(1)
        command = [*self._program, "--runtime-dir", str(self.runtime_dir)]
        names = list(self.stored)
        moves = " ".join(f"{3 + at}<&{self.stored[name]}" for at, name in enumerate(names))
        listen = f"LISTEN_PID=$$ LISTEN_FDS={len(names)} LISTEN_FDNAMES={':'.join(names)}" if names else ""
        process = subprocess.Popen(
            ["bash", "-c", f'{listen} exec "$@" {moves}', "-", *command],
            stderr=(self.runtime_dir.parent / "qgpud.log").open("a"),
            pass_fds=list(self.stored.values()),
            env=environment() | {"NOTIFY_SOCKET": self._address, "STATE_DIRECTORY": str(self.state_dir)},
        )
        word = ""
        while word != "READY=1":
            with suppress(TimeoutError):
                word = self.hear()
            if process.poll() is not None:
                raise AssertionError((self.runtime_dir.parent / "qgpud.log").read_text()[-3000:])
        self._socket.settimeout(TIMEOUT_S)
        return process

    def listen(self) -> None:
        """Hear everything that has been said."""
        self._socket.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                self.hear()

    def hear(self) -> str:
        """Return the next notification, and do what it asks for."""
        data, fds, _, _ = socket.recv_fds(self._socket, 4096, 16)
        words = dict(line.split("=", 1) for line in data.decode().splitlines())
        if "FDSTORE" in words:
            self.stored[words["FDNAME"]] = fds[0]
        if "FDSTOREREMOVE" in words and (fd := self.stored.pop(words["FDNAME"], None)) is not None:
            os.close(fd)
        return data.decode()

    def forget(self) -> None:
        """Keep nothing for the next daemon."""
        self.listen()
        for fd in self.stored.values():
            os.close(fd)
        self.stored.clear()

    def close(self) -> None:
        """Forget what is stored, and listen no more."""
        self.forget()
        self._socket.close()
        os.unlink(self._address)  # for the next
