"""The daemon's end of the standby guardian (``qgpu/guardian/failover/standby.py``): starts, informs, promotes it."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from qgpu.errors import BackendGoneError
from qgpu.guardian.failover.handover import StateFds
from qgpu.ipc import wire
from qgpu.ipc.systemd import to_journal

#: How long one that is being loaded may take until it is a guardian, on a host that is busy.
_START_S = 15.0
#: How long a message to it may take: it reads its messages when it is loaded, and a thousand fit before.
_PATIENCE_S = 0.1


class Standby:
    """A process that becomes the guardian when it is told to, or by itself when we are gone and the guardian too."""

    def __init__(self, runtime_dir: Path, state: StateFds, listeners: Mapping[int, tuple[str, int]]) -> None:
        """Start it, in a session of its own: who stops us shall not stop it. Raises BackendGoneError."""
        self.began_s = time.monotonic()
        #: Whether it has been told to be the guardian.
        self.begun = False
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise BackendGoneError(f"guardian: it cannot be started: {error}") from error
        self._connection = wire.Connection(ours)
        fds = [fd for _, fd in listeners.values()]
        try:
            with theirs, nullcontext() if to_journal() else (runtime_dir / "guardian.log").open("a") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "qgpu.guardian", str(runtime_dir), *map(str, (*state, theirs.fileno()))],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    pass_fds=[*state, theirs.fileno(), *fds],
                    start_new_session=True,
                    cwd="/",
                )
            ours.settimeout(_PATIENCE_S)
            self._say({"op": "hold", "inherited": listeners})
            threading.Thread(target=self._process.wait, daemon=True, name="guardian-reaper").start()
        except (OSError, RuntimeError) as error:  # no memory, no processes or threads to be had
            ours.close()
            raise BackendGoneError(f"guardian: it cannot be started: {error}") from error

    @property
    def lives(self) -> bool:
        """Tell whether it can still begin."""
        return self._process.returncode is None

    def hold(self, number: int, pod: str, fd: int) -> None:
        """Let it have a copy of a listener."""
        self._say({"op": "hold", "number": number, "pod": pod}, fd)

    def let_go(self, number: int) -> None:
        """Let it close a listener behind which nobody is left."""
        self._say({"op": "hold", "number": number})

    def begin(self, *, killed: bool) -> None:
        """Let it begin, after a guardian that was ``killed`` and may take a moment to be gone. Safe to call twice."""
        if not self.begun:
            self.begun = True
            self.began_s = time.monotonic()
            self._say({"op": "begin", "killed": killed})

    def said(self, timeout_s: float) -> dict[str, Any] | None:
        """Return what it says when it has begun, or could not; None for nothing yet. Raises BackendGoneError."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            if time.monotonic() - self.began_s < _START_S:
                return None
            self.kill()  # it may be stopped
        try:
            message = self._connection.receive()
        except (OSError, wire.WireError):
            message = None
        self._connection.close()
        if message is None:
            raise BackendGoneError("guardian: died at start; its log says why")
        return message[0]

    def yield_to(self, guardian: int) -> None:
        """Let another process be the guardian, if it is another: this one would wait for its end."""
        if guardian != self._process.pid:
            self.kill()
        self._connection.close()

    def end(self) -> None:
        """Let it end: the daemon does, and the guardian stays as it is, be it this one."""
        if self.begun:
            self._connection.close()
            return
        with suppress(OSError):
            self._connection.send({"op": "end"})
        self._connection.close()
        try:
            self._process.wait(_START_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Let it be none. One that has ended is not looked for: its number may be another's by now."""
        self._process.kill()

    def _say(self, message: dict[str, Any], *fds: int) -> None:
        """Tell it something; one that does not listen is none."""
        try:
            self._connection.send(message, fds)
        except OSError:
            self.kill()
