"""The control socket, both ends: requests with one answer each, and who may make which.

What requests mean is the daemon's business; this file carries them, vouches for the peer and turns errors
into answers and back.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from qgpu import errors, wire
from qgpu.door import Door
from qgpu.errors import DaemonUnreachableError, ExitCode, PermissionDeniedError, QgpuError, TimedOutError
from qgpu.places import socket_path
from qgpu.systemd import Store

_log = structlog.get_logger("control")

SCHEMA = "qgpu/v1"

_SO_PEERGROUPS = 59  # include/uapi/asm-generic/socket.h, since Linux 4.13; Python has no name for it
_MAX_BYTES = 1024  # what Python's getsockopt takes: 256 groups


class Client:
    """One connection to the daemon."""

    def __init__(self, runtime_dir: Path, timeout_s: float = 10.0) -> None:
        path = socket_path(runtime_dir)
        self._timeout_s = timeout_s
        try:
            self._connection = wire.connect(str(path), timeout_s)
        except PermissionError as error:
            raise PermissionDeniedError(f"{path}: permission denied; ask for membership in its group") from error
        except TimeoutError as error:
            raise TimedOutError(f"{path}: no connection within {timeout_s:g} s") from error
        except OSError as error:
            raise DaemonUnreachableError(f"{path}: {error.strerror or error}; is qgpud running?") from error

    def call(self, op: str, fds: Sequence[int] = (), **arguments: Any) -> dict[str, Any]:
        """Make a request and return its answer. Raises the error the daemon names, or why there was no answer."""
        try:
            self._connection.send({"op": op, **arguments}, fds)
            received = self._connection.receive()
        except TimeoutError as error:
            raise TimedOutError(f"qgpud: no answer within {self._timeout_s:g} s") from error
        except (OSError, wire.WireError) as error:
            raise DaemonUnreachableError(f"qgpud: connection lost: {error}") from error
        if received is None:
            raise DaemonUnreachableError("qgpud: it hung up")
        answer, _ = received
        if not answer.get("ok"):
            raise errors.from_code(int(answer.get("code", 1)), str(answer.get("error", "refused")))
        return answer

    def fileno(self) -> int:
        """Return the descriptor to poll: readable without a request pending means that the daemon is gone."""
        return self._connection.fileno()

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True, eq=False)
class Session:
    """One client of the daemon: who it is, what it may do, what is to be done when it hangs up."""

    peer: wire.Peer
    may_change: bool
    #: Names its process for as long as it is here; None where it had ended before it was heard.
    process: int | None
    at_end: list[Callable[[], None]] = field(default_factory=list)


#: Clients at a time, and of them such as may only look: they take no place from those who may change things.
MAX_CLIENTS, MAX_GUESTS = 512, 128
#: Who may only look sends no more at once, and all of them together are answered no more often: reading and answering
#: takes time from the loops.
_GUEST_BYTES, _GUEST_PAUSE_S = 1 << 16, 0.005

#: Answers one request. A handler that keeps descriptors takes them out of the list; the rest is closed.
Handler = Callable[[Session, dict[str, Any], list[int]], dict[str, Any]]


class Server:
    """Listens on the control socket and serves every client in a thread of its own."""

    def __init__(
        self,
        runtime_dir: Path,
        mode: int,
        group_id: int | None,
        handle: Handler,
        store: Store,
        trusts: Callable[[Session], bool] = lambda _: True,
    ) -> None:
        """Listen. Who may change things but is not trusted is heard no more than who may only look.

        Raises PermissionDeniedError where nobody could connect.
        """
        self._handle = handle
        self._trusts = trusts
        self._guests = self._clients = 0
        self._counting, self._guests_turn = threading.Lock(), threading.Lock()
        self._group_id = group_id
        path = socket_path(runtime_dir)
        self._door = Door("control", path, mode, store, self._take)
        if group_id is not None:
            try:
                shutil.chown(path, group=group_id)
            except OSError as error:
                self._door.close()
                raise PermissionDeniedError(
                    f"{path}: {error.strerror}; to give it to group {group_id}, run qgpud as root or as its member"
                ) from error

    def close(self) -> None:
        """Take no more clients."""
        self._door.close()

    def _take(self, sock: socket.socket) -> None:
        """Serve a client in a thread of its own, if there is room for it."""
        connection = wire.Connection(sock)
        session = Session(connection.peer(), self._may_change(connection), _process(connection))
        try:
            if not self._count(session, 1):
                raise RuntimeError("there are as many clients as there may be")
            try:
                threading.Thread(target=self._serve, args=(connection, session), name="client", daemon=True).start()
            except BaseException:
                self._count(session, -1)
                raise
        except RuntimeError as error:  # or no more threads are to be had
            _log.warning("client not heard", pid=session.peer.pid, uid=session.peer.uid, reason=str(error))
            with suppress(OSError):
                connection.send(_refusal("qgpud: too many clients; try again", ExitCode.REFUSED))
            _end(connection, session)

    def _count(self, session: Session, by: int) -> bool:
        """Count a client in or out; False when there is no room for it."""
        with self._counting:
            guests, clients = self._guests + (0 if session.may_change else by), self._clients + by
            if by > 0 and (clients > MAX_CLIENTS or guests > MAX_GUESTS):
                return False
            self._guests, self._clients = guests, clients
            return True

    def _serve(self, connection: wire.Connection, session: Session) -> None:
        try:
            connection.sock.setblocking(True)
            guest = not session.may_change or not self._trusts(session)
            if guest:
                connection.max_message = _GUEST_BYTES
            while (received := connection.receive()) is not None:
                if guest:
                    with self._guests_turn:
                        time.sleep(_GUEST_PAUSE_S)
                connection.send(self._answer(session, *received))
        except (OSError, wire.WireError):
            pass  # a client that went away or talks nonsense has no answer to expect
        finally:
            _end(connection, session)
            self._count(session, -1)
            for call in session.at_end:
                call()

    def _answer(self, session: Session, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        try:
            return {"ok": True, "schema": SCHEMA, **self._handle(session, message, fds)}
        except QgpuError as error:
            return _refusal(str(error), error.code)
        except Exception as error:  # noqa: BLE001 - a defect: its client is to hear of it, and others not
            _log.exception("request failed", op=str(message.get("op")))
            return _refusal(f"qgpud: {error!r}; see its log", ExitCode.FAILED)
        finally:
            for fd in fds:
                os.close(fd)

    def _may_change(self, connection: wire.Connection) -> bool:
        peer = connection.peer()
        return peer.uid in (0, os.geteuid()) or (
            self._group_id is not None and self._group_id in (peer.gid, *_groups(connection.sock))
        )


def _process(connection: wire.Connection) -> int | None:
    try:
        return connection.peer_process()
    except OSError:
        return None


def _end(connection: wire.Connection, session: Session) -> None:
    connection.close()
    if session.process is not None:
        os.close(session.process)


def _refusal(error: str, code: ExitCode) -> dict[str, Any]:
    return {"ok": False, "schema": SCHEMA, "error": error, "code": int(code)}


def _groups(sock: socket.socket) -> tuple[int, ...]:
    """Return the peer's supplementary groups as the kernel noted them when it connected; none if too many."""
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_BYTES)
    except OSError:  # ERANGE: in doubt the peer may not
        return ()
    return struct.unpack(f"{len(data) // 4}I", data)
