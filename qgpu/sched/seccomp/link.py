"""A connection to the guardian: requests with answers, and how one that hangs is told from one that is only slow."""

from __future__ import annotations

import os
import platform
import select
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qgpu import errors, proc, wire
from qgpu.errors import BackendGoneError, NotSupportedError, RefusedError
from qgpu.guardian import room
from qgpu.guardian.filter import ARCHES
from qgpu.messages import PROTOCOL

#: A guardian that has not answered after this long is given up if it was stopped: that one can't,
_STOPPED_MS = 150
#: and after this long unless a call of the driver's keeps it, which would keep another one as well:
_HANGS_MS = 400
#: then after this long. With the guardian's start it makes less than a second that a pod may be held up.
_PATIENCE_S = 2.0


#: No reason to take a guardian for dead.
_NO_ROOM = "guardian: no descriptor is left for a connection to it; raise the limit (LimitNOFILE=)"


class GuardianHangsError(BackendGoneError):
    """A guardian is there and does not answer; ``pid`` is its process."""

    def __init__(self, pid: int, why: str) -> None:
        super().__init__(f"guardian (process {pid}): {why}")
        self.pid = pid


class Link:
    """A connection to the guardian: requests with answers, and events that come by themselves."""

    def __init__(self, path: Path, *, watch: bool) -> None:
        try:
            self._connection = wire.connect(str(path), _PATIENCE_S)
        except OSError as error:
            if error.errno in room.NONE_LEFT:
                raise RefusedError(_NO_ROOM) from error
            raise BackendGoneError(f"guardian at {path}: {error.strerror or error}") from error
        self._lock = threading.Lock()
        self._over = False
        #: Whether it is over because there was no answer in time.
        self.hangs = False
        self.events: list[dict[str, Any]] = []
        try:
            self.hello, fds = self.call("hello", watch=watch)
        except BackendGoneError as error:
            pid = self._connection.peer().pid
            self._connection.close()
            raise GuardianHangsError(pid, str(error)) from error
        if not fds:  # the kernel drops those for which there is no room
            self._connection.close()
            raise RefusedError(_NO_ROOM)
        self.journal_fd = fds[0]
        #: Names the guardian's process for as long as this link lives, whatever becomes of its number.
        self.pidfd = pidfd_of(int(self.hello["pid"]))
        if self.hello.get("protocol") != PROTOCOL:
            self.close()
            raise NotSupportedError(
                f"guardian (process {self.hello['pid']}): left by another version of qgpu; "
                "end its pods, or go back to that version"
            )

    def call(self, op: str, fds: Sequence[int] = (), **arguments: Any) -> tuple[dict[str, Any], list[int]]:
        """Ask and return the answer with its descriptors. Raises BackendGoneError or what the guardian says."""
        with self._lock:
            if self._over:
                raise BackendGoneError("guardian: the connection is over")
            try:
                self._connection.send({"op": op, **arguments}, fds)
                message = self._answer()
            except (OSError, wire.WireError) as error:
                self._over = True  # an answer that comes after all would be taken for the next one's
                self.hangs = isinstance(error, TimeoutError)
                raise BackendGoneError(f"guardian: {error}") from error
            if message is None:
                self._over = True
                raise BackendGoneError("guardian: it has died")
        answer, received = message
        if not answer["ok"]:
            raise errors.from_code(answer["code"], answer["error"])
        return answer, received

    def _answer(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return what comes and is no event; None at the end of the connection."""
        while True:
            while (message := self._connection.next_buffered()) is not None:
                if "event" not in message[0]:
                    return message
                self.events.append(message[0])
            self._wait_for_word()
            if not self._connection.fill():
                return None

    def _wait_for_word(self) -> None:
        """Return when something has come. Raises TimeoutError when nothing will."""
        poll, pid = select.poll(), self._connection.peer().pid
        poll.register(self._connection, select.POLLIN)
        if poll.poll(_STOPPED_MS):
            return
        if _is_stopped(pid):
            raise TimeoutError("its process is stopped")
        before = _times(pid)
        if poll.poll(_HANGS_MS - _STOPPED_MS):
            return
        if not is_in_driver(pid, before):
            raise TimeoutError("it does not answer")
        if not poll.poll(_PATIENCE_S * 1000):
            raise TimeoutError("it does not answer, for a call of the driver keeps it")

    def wait(self, timeout_ns: int) -> None:
        """Return when an event is there or time is up."""
        if not self.events:
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            if poll.poll(timeout_ns / 1e6):
                with self._lock:
                    self._over |= not self._connection.fill()
                    while (message := self._connection.next_buffered()) is not None:
                        self.events.append(message[0])

    def close(self) -> None:
        """Hang up: a plan that was applied here is over. Safe to call twice."""
        fds, self.journal_fd, self.pidfd = (self.journal_fd, self.pidfd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)
        self._over = True
        self._connection.close()


def is_in_driver(pid: int, before: tuple[int, int] = (0, 0)) -> bool:
    """Tell whether a process's first thread is in an ioctl; of one that runs, whether rather in the kernel of late.

    ``before`` is its time in user mode and in the kernel when that began, in clock ticks.
    """
    try:
        call = Path(f"/proc/{pid}/task/{pid}/syscall").read_text().split()[0]
    except OSError:
        return False
    if call == "running":
        user, system = _times(pid)
        return system - before[1] > user - before[0]
    return call == str(ARCHES[platform.machine()][0].ioctl)


def _is_stopped(pid: int) -> bool:
    return (_stat(pid) or ["-"])[0] in "Tt"


def _times(pid: int) -> tuple[int, int]:
    fields = _stat(pid)
    return (int(fields[11]), int(fields[12])) if fields else (0, 0)


def _stat(pid: int) -> list[str]:
    try:
        return proc.stat(pid)
    except OSError:  # for want of descriptors nothing is known either
        return []


def pidfd_of(pid: int) -> int:
    """Open a process; -1 for one that is gone."""
    try:
        return os.pidfd_open(pid)
    except OSError:  # died this moment; the next call will tell
        return -1
