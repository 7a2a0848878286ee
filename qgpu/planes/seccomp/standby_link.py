"""The daemon's end of the standby guardian (``qgpu/guardian/failover/standby.py``): starts, informs, promotes it."""

from __future__ import annotations

import select
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from qgpu.errors import BackendGoneError
from qgpu.guardian.failover.state_fds import StateFds
from qgpu.ipc import wire
from qgpu.ipc.systemd import to_journal
from qgpu.linux import proc
from qgpu.linux.interpreter import python

#: How long loading may take until it is the guardian, on a busy host. If it then used a part of this time to run, it
#: gets as much again: a long journal takes time. In all it gets _LONGEST_S.
_START_S, _PART, _LONGEST_S = 15.0, 0.05, 120.0
#: How long a message to it may take: it reads messages once it is loaded, and a thousand fit in the queue before.
_PATIENCE_S = 0.1


class StandbyLink:
    """A process that becomes the guardian when it is promoted, or by itself if both we and the guardian are gone."""

    def __init__(self, runtime_dir: Path, state: StateFds, listeners: Mapping[int, tuple[str, int]]) -> None:
        """Start it in its own session, so that a signal to ours does not end it. Raises BackendGoneError."""
        self.began_s = time.monotonic()
        #: Whether it was promoted; up to when it may load, and its CPU time in s when it got so much time.
        self.begun = False
        self._until_s = self.began_s + _START_S
        self._used_s = 0.0
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise BackendGoneError(f"guardian: it cannot be started: {error}") from error
        self._connection = wire.Connection(ours)
        fds = [fd for _, fd in listeners.values()]
        try:
            with theirs, nullcontext() if to_journal() else (runtime_dir / "guardian.log").open("a") as log:
                self._process = subprocess.Popen(
                    python("-m", "qgpu.guardian", str(runtime_dir), *map(str, (*state, theirs.fileno()))),
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
        except (OSError, RuntimeError) as error:  # no memory, processes or threads are available
            ours.close()
            raise BackendGoneError(f"guardian: it cannot be started: {error}") from error

    @property
    def lives(self) -> bool:
        """Tell whether it still runs."""
        return self._process.returncode is None

    def hold(self, number: int, pod: str, fd: int) -> None:
        """Give it a copy of a listener."""
        self._say({"op": "hold", "number": number, "pod": pod}, fd)

    def drop_listener(self, number: int) -> None:
        """Let it close a listener without processes behind it."""
        self._say({"op": "hold", "number": number})

    def begin(self, *, killed: bool) -> None:
        """Promote it, after a guardian that was ``killed`` and may take a moment to end. Safe to call twice."""
        if not self.begun:
            self.begun = True
            self.began_s = time.monotonic()
            self._until_s, self._used_s = self.began_s + _START_S, proc.cpu_s(self._process.pid)
            self._say({"op": "begin", "killed": killed})

    def wait_for_report(self, timeout_s: float) -> dict[str, Any] | None:
        """Return its report that it is the guardian, or why not; None before that. Raises BackendGoneError."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            if time.monotonic() < self._until_s or self._has_run():
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

    def _has_run(self) -> bool:
        """Tell whether it ran while we waited for it; then it gets more time."""
        before_s, self._used_s = self._used_s, proc.cpu_s(self._process.pid)
        self._until_s += _START_S
        return self._used_s - before_s > _PART * _START_S and self._until_s - self.began_s <= _LONGEST_S

    def kill_if_superseded(self, guardian: int) -> None:
        """Kill it if another process is the ``guardian`` (its pid): it would wait for that one's end."""
        if guardian != self._process.pid:
            self.kill()
        self._connection.close()

    def end(self) -> None:
        """End it as the daemon ends; if it is the guardian, it stays."""
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
        """Kill it. If it has ended, do nothing: its pid may be reused."""
        self._process.kill()

    def _say(self, message: dict[str, Any], *fds: int) -> None:
        """Send it a message; kill it if it does not read."""
        try:
            self._connection.send(message, fds)
        except OSError:
            self.kill()
