"""A service manager as a daemon sees one: hears its notifications, and keeps its descriptors for the next daemon."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

from tests.cli.programs import TIMEOUT_S, environment


class Manager:
    """Starts daemons one after the other, as systemd restarts a service.

    A thread hears what they say: a daemon with a descriptor to store waits while the socket's queue is full, which its
    signs of life alone can fill.
    """

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
        self._socket.setblocking(False)
        #: What was said and not asked for yet; notified when there is more.
        self._said: deque[str] = deque()
        self._more = threading.Condition()
        self._end = os.eventfd(0)
        self._thread = threading.Thread(target=self._listen, name="manager", daemon=True)
        self._thread.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start a daemon with what is stored, and return when it is ready."""
        self.listen()  # what the last one said before it ended
        with self._more:
            self._said.clear()
        command = [*self._program, "--runtime-dir", str(self.runtime_dir)]
        names = list(self.stored)
        moves = " ".join(f"{3 + at}<&{self.stored[name]}" for at, name in enumerate(names))
        listen = f"LISTEN_PID=$$ LISTEN_FDS={len(names)} LISTEN_FDNAMES={':'.join(names)}" if names else ""
        with (self.runtime_dir.parent / "qgpud.log").open("a") as log:
            process = subprocess.Popen(
                ["bash", "-c", f'{listen} exec "$@" {moves}', "-", *command],
                stderr=log,
                pass_fds=list(self.stored.values()),
                env=environment() | {"NOTIFY_SOCKET": self._address, "STATE_DIRECTORY": str(self.state_dir)},
            )
        word = ""
        while word != "READY=1":
            with suppress(TimeoutError):
                word = self.hear(1)
            if process.poll() is not None:
                raise AssertionError((self.runtime_dir.parent / "qgpud.log").read_text()[-3000:])
        return process

    def hear(self, timeout_s: float = TIMEOUT_S) -> str:
        """Return the next notification. Raises TimeoutError."""
        with self._more:
            if not self._more.wait_for(lambda: self._said, timeout_s):
                raise TimeoutError
            return self._said.popleft()

    def listen(self) -> None:
        """Hear everything that has been said, and do what it asks for."""
        with self._more, suppress(BlockingIOError):
            while True:
                data, fds, _, _ = socket.recv_fds(self._socket, 4096, 16)
                self._said.append(data.decode())
                self._more.notify_all()
                words = dict(line.split("=", 1) for line in data.decode().splitlines())
                name = words.get("FDNAME", "")
                if ("FDSTORE" in words or "FDSTOREREMOVE" in words) and name in self.stored:
                    os.close(self.stored[name])
                    self.stored = {each: fd for each, fd in self.stored.items() if each != name}
                if "FDSTORE" in words:
                    self.stored = {**self.stored, name: fds[0]}

    def _listen(self) -> None:
        poll = select.poll()
        for each in (self._socket.fileno(), self._end):
            poll.register(each, select.POLLIN)
        while self._end not in (fd for fd, _ in poll.poll()):
            self.listen()

    def forget(self) -> None:
        """Keep nothing for the next daemon."""
        self.listen()
        with self._more:
            for fd in self.stored.values():
                os.close(fd)
            self.stored = {}

    def close(self) -> None:
        """Forget what is stored, and listen no more."""
        os.eventfd_write(self._end, 1)
        self._thread.join()
        self.forget()
        self._socket.close()
        os.close(self._end)
        os.unlink(self._address)  # for the next
