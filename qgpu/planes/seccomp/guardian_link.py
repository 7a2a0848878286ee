"""A connection to the guardian: requests with answers, and events."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qgpu import errors
from qgpu.errors import BackendGoneError, NotSupportedError, RefusedError
from qgpu.guardian.failover.state_fds import StateFds
from qgpu.ipc import wire
from qgpu.ipc.codec import PROTOCOL
from qgpu.linux import fd_budget
from qgpu.planes.seccomp.hang_detector import LOOK_MS, HangDetector

#: How long connecting may take.
_PATIENCE_S = 2.0
#: A shortage of descriptors does not mean that the guardian is dead.
_NO_ROOM = "guardian: no descriptor is left for a connection to it; raise the limit (LimitNOFILE=)"


class GuardianHangsError(BackendGoneError):
    """A guardian exists and does not answer; ``pid`` is its process."""

    def __init__(self, pid: int, why: str) -> None:
        super().__init__(f"guardian (process {pid}): {why}")
        self.pid = pid


class GuardianLink:
    """A connection to the guardian: requests with answers, and unsolicited events."""

    def __init__(self, path: Path, *, watch: str = "") -> None:
        """Connect, and ask for one kind of events or none."""
        try:
            self._connection = wire.connect(str(path), _PATIENCE_S)
        except OSError as error:
            if error.errno in fd_budget.OUT_OF_FDS:
                raise RefusedError(_NO_ROOM) from error
            raise BackendGoneError(f"guardian at {path}: {error.strerror or error}") from error
        self._lock = threading.Lock()
        #: Whether the connection has ended, and the error if that ended it: TimeoutError if an answer came too late.
        self.over = False
        self.failure: Exception | None = None
        self.events: list[dict[str, Any]] = []
        try:
            self.hello, fds = self.call("hello", watch=watch)
        except BackendGoneError as error:
            pid = self._connection.peer().pid
            self._connection.close()
            raise GuardianHangsError(pid, str(error)) from error
        same_version = self.hello.get("protocol") == PROTOCOL
        if not same_version or len(fds) < len(StateFds._fields):  # the kernel drops descriptors without a free number
            for fd in fds:
                os.close(fd)
            self._connection.close()
            if same_version:
                raise RefusedError(_NO_ROOM)
            raise NotSupportedError(
                f"guardian (process {self.hello['pid']}): left by another version of qgpu; "
                "end its pods, or go back to that version"
            )
        #: The state that the guardian leaves to its successor.
        self.state: StateFds | None = StateFds(*fds)
        #: The guardian's pidfd, which stays valid even if the pid is reused.
        self.pidfd = pidfd_of(int(self.hello["pid"]))

    def call(self, op: str, fds: Sequence[int] = (), **arguments: Any) -> tuple[dict[str, Any], list[int]]:
        """Make a request; return its answer and descriptors. Raises BackendGoneError or the guardian's error."""
        with self._lock:
            if self.over:
                raise BackendGoneError("guardian: connection closed")
            try:
                self._connection.send({"op": op, **arguments}, fds)
                answer, received = self._answer()
            except (OSError, wire.WireError) as error:
                self.over, self.failure = True, error  # a late answer would be taken for the next one
                raise BackendGoneError(f"guardian: {error}") from error
        if not answer["ok"]:
            raise errors.from_code(answer["code"], answer["error"])
        return answer, received

    def _answer(self) -> tuple[dict[str, Any], list[int]]:
        """Return the next message that is not an event. Raises OSError if there is none, or the guardian hangs."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while True:
            while (message := self._connection.next_buffered()) is not None:
                if "event" not in message[0]:
                    return message
                self.events.append(message[0])
            if not poll.poll(LOOK_MS):
                silence = HangDetector(self._connection.peer().pid)
                while not poll.poll(LOOK_MS):
                    silence.look()
            if not self._connection.fill():
                raise ConnectionError("it has died")

    def wait(self, timeout_ns: int) -> None:
        """Return when an event has arrived or the time is up."""
        if not self.events:
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            if poll.poll(timeout_ns / 1e6):
                with self._lock:
                    self.over |= not self._connection.fill()
                    while (message := self._connection.next_buffered()) is not None:
                        self.events.append(message[0])

    def close(self) -> None:
        """Close the connection: a plan that was applied through it ends. Safe to call twice."""
        fds = (*(self.state or ()), *([self.pidfd] if self.pidfd >= 0 else ()))
        self.state, self.pidfd = None, -1
        for fd in fds:
            os.close(fd)
        self.over = True
        self._connection.close()


def pidfd_of(pid: int) -> int:
    """Open a pidfd of a process; -1 if it has ended."""
    try:
        return os.pidfd_open(pid)
    except OSError:  # it died just now; the next call reveals that
        return -1
