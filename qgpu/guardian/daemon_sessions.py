"""The daemon's connections to the guardian: which peers it accepts, and what happens to a plan when its sender goes."""

from __future__ import annotations

import errno
import fcntl
import os
import selectors
import struct
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from qgpu.errors import ExitCode, QgpuError
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.ipc import wire
from qgpu.linux import cgroup

_log = structlog.get_logger("guardian")

#: How long a message to a daemon may take; then the session ends.
_PATIENCE_S = 0.1
#: A session that has left so much of the socket's memory unread gets no events, so that its next answer fits as well.
_MOST_UNREAD = 16 << 10
#: How many events a session may be owed; then it ends. There is one for each listener at most, and one for all changes.
_MOST_OWED = 1024
#: How long to pause when a connection cannot be accepted.
_PAUSE_S = 0.01

Answer = tuple[dict[str, Any], list[int]]


@dataclass(slots=True)
class DaemonSession:
    """One connection of a daemon; ``cards`` are those whose plan it sent."""

    connection: wire.Connection
    cards: set[int] = field(default_factory=set)
    #: The kind of events that it wants.
    watching: str = ""
    #: Events that it gets once it has read more.
    _owed: list[dict[str, Any]] = field(default_factory=list)

    def tell(self, event: dict[str, Any]) -> None:
        """Send an event, or owe it, without waiting for the peer. Raises OSError if it is gone or owed too many."""
        if event not in self._owed:
            self._owed.append(event)
        self.send_owed()
        if len(self._owed) > _MOST_OWED:
            raise BlockingIOError(errno.EAGAIN, "events are not read")

    def send_owed(self) -> None:
        """Send events as long as little is unread. Raises OSError."""
        while self._owed and self._unread() < _MOST_UNREAD:
            self.connection.send(self._owed[0])
            del self._owed[0]

    def _unread(self) -> int:
        """Return how many bytes of the socket's memory hold what the peer has not read (SIOCOUTQ, unix_outq_len)."""
        return int(struct.unpack("i", fcntl.ioctl(self.connection, termios.TIOCOUTQ, bytes(4)))[0])


#: Handles a request: gets its message and descriptors, and returns what it answers, if that is anything.
Operation = Callable[[DaemonSession, dict[str, Any], list[int]], Answer | None]


class DaemonSessions:
    """All connections; the main loop reads each of them when data arrives."""

    def __init__(
        self,
        path: Path,
        selector: selectors.BaseSelector,
        table: ObjectTable,
        operation: Callable[[str], Operation],
        release: Callable[[int], None],
    ) -> None:
        self._selector = selector
        self._table = table
        #: Finds the handler of a request by name. Raises AttributeError.
        self._operation = operation
        #: Ends the plan of a card.
        self._release = release
        self._sessions: dict[int, DaemonSession] = {}
        self._path = path
        self._listening = wire.listen(str(path), 0o600)
        selector.register(self._listening, selectors.EVENT_READ, self._accept)

    def restore_socket(self) -> None:
        """Listen again if the socket was removed, so that the next daemon finds us."""
        try:
            if self._path.exists():
                return
            self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            listening = wire.listen(str(self._path), 0o600)
        except OSError as error:
            _log.error("guardian socket not restored", path=str(self._path), reason=str(error))
            return
        _log.warning("guardian socket removed: listening again", path=str(self._path))
        self._selector.unregister(self._listening)
        self._listening.close()
        self._listening = listening
        self._selector.register(listening, selectors.EVENT_READ, self._accept)

    def __len__(self) -> int:
        return len(self._sessions)

    def broadcast(self, event: dict[str, Any]) -> None:
        """Send an event to all sessions that watch its kind. One that does not read gets it when it next asks."""
        for number, session in list(self._sessions.items()):
            if session.watching == event["event"]:
                try:
                    session.tell(event)
                except OSError:
                    self._hang_up(number)

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except OSError as error:
            _log.error("daemon connection not accepted, trying again", reason=str(error))
            time.sleep(_PAUSE_S)
            return
        sock.settimeout(_PATIENCE_S)  # a stopped daemon must not stop us: it loses its session
        session = DaemonSession(wire.Connection(sock))
        if self._is_in_pod(session.connection):
            _log.warning("connection from a pod's process refused", pid=session.connection.peer().pid)
            session.connection.close()
            return
        number = sock.fileno()
        self._sessions[number] = session
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._hear(number))

    def _is_in_pod(self, connection: wire.Connection) -> bool:
        """Tell whether a peer is a pod's process, root in it or not; a process that has ended may have been one."""
        pid = connection.peer().pid
        try:
            process = connection.peer_process()
            try:
                path = cgroup.of(pid)
                if wire.has_ended(process):
                    return True
            finally:
                os.close(process)
        except OSError:
            return True
        within = any(cgroup.within(path, at) for pod in self._table.pods.values() for at in pod.cgroups)
        return within or pid in self._table.processes

    def _hear(self, number: int) -> None:
        session = self._sessions.get(number)
        if session is None:  # closed while others were served
            return
        try:
            alive = session.connection.fill()
            while (message := session.connection.next_buffered()) is not None:
                reply, fds = self._reply(session, *message)
                session.send_owed()
                session.connection.send(reply, fds)
        except (OSError, wire.WireError) as error:
            _log.warning("session broken", reason=str(error))
            alive = False
        if not alive and number in self._sessions:
            self._hang_up(number)

    def _hang_up(self, number: int) -> None:
        session = self._sessions.pop(number)
        self._selector.unregister(session.connection.sock)
        session.connection.close()
        for index in session.cards:
            _log.info("daemon gone: gates open, driver timeslices restored", pgpu=index)
            self._release(index)

    def _reply(self, session: DaemonSession, message: dict[str, Any], fds: list[int]) -> Answer:
        try:
            answer, out = self._operation(message["op"])(session, message, fds) or ({}, [])
            return {"ok": True, **answer}, out
        except QgpuError as error:
            refusal = {"ok": False, "error": str(error), "code": int(error.code)}
        except Exception as error:  # noqa: BLE001 - the sender gets whatever error its request causes
            _log.exception("bad request")
            refusal = {"ok": False, "error": f"bad request: {error!r}", "code": int(ExitCode.FAILED)}
        for fd in fds:
            with suppress(OSError):
                os.close(fd)
        return refusal, []
