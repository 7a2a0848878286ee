"""Both ends of the control socket: requests with one answer each, and which clients may change things.

This file transports requests, identifies the peer, and turns errors into answers and back. The daemon interprets the
requests.
"""

from __future__ import annotations

import errno
import grp
import os
import shutil
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from qgpu import errors
from qgpu.errors import DaemonUnreachableError, ExitCode, PermissionDeniedError, QgpuError, TimedOutError
from qgpu.ipc import subordinate_uids, wire
from qgpu.ipc.client_limits import ClientLimits
from qgpu.ipc.listener import SocketListener
from qgpu.ipc.systemd import FdStore
from qgpu.linux import untrusted_fds
from qgpu.paths import SERVICE, default_runtime_dir, root_socket_path, shared_runtime_dir, socket_path

_log = structlog.get_logger("control")

SCHEMA = "qgpu/v1"

_SO_PEERGROUPS = 59  # include/uapi/asm-generic/socket.h, since Linux 4.13; Python has no name for it
_MAX_BYTES = 1024  # the most that Python's getsockopt accepts: 256 groups


def how_to_start(runtime_dir: Path) -> str:
    """Return how to start the daemon of a directory: as the service, unless another directory was chosen."""
    default = not os.environ.get("QGPU_RUNTIME_DIR") and runtime_dir == default_runtime_dir()
    service = default or runtime_dir == SERVICE
    return f"start it: {'systemctl start qgpud' if service else f'qgpud --runtime-dir {runtime_dir}'}"


def without_permission(group_id: int | None) -> str:
    """Return the remedy for a user without permission; ``group_id`` is the socket's group, if it has one."""
    if not group_id:
        return "use sudo"
    try:
        return f"use sudo, or join group {grp.getgrgid(group_id).gr_name}"
    except KeyError:
        return f"use sudo, or join group {group_id}"


def _who_may_connect(path: Path) -> str:
    with suppress(OSError):
        found = path.stat()
        return without_permission(found.st_gid if found.st_mode & stat.S_IWGRP else None)
    return without_permission(None)


class Client:
    """One connection to the daemon."""

    def __init__(self, runtime_dir: Path, timeout_s: float = 10.0) -> None:
        path = socket_path(runtime_dir)
        self._timeout_s = timeout_s
        try:
            self._connection = _connect_as_root(runtime_dir, timeout_s) or wire.connect(str(path), timeout_s)
        except PermissionError as error:
            raise PermissionDeniedError(f"{path}: permission denied; {_who_may_connect(path)}") from error
        except TimeoutError as error:
            raise TimedOutError(f"{path}: no connection within {timeout_s:g} s") from error
        except OSError as error:
            if error.errno in (None, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):  # no daemon can listen there
                raise errors.unusable(path, "choose another --runtime-dir", error) from error
            raise DaemonUnreachableError(f"{path}: {error.strerror or error}; {how_to_start(runtime_dir)}") from error
        if runtime_dir == shared_runtime_dir() and self._connection.peer().uid not in (0, os.geteuid()):
            self._connection.close()
            raise PermissionDeniedError(f"{path}: another user listens there; set XDG_RUNTIME_DIR or QGPU_RUNTIME_DIR")

    def call(self, op: str, fds: Sequence[int] = (), **arguments: Any) -> dict[str, Any]:
        """Make a request and return its answer. Raises the daemon's error, or the reason for a missing answer."""
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

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True, eq=False)
class Session:
    """One client of the daemon: its identity, its rights, and what to do when it hangs up."""

    peer: wire.Peer
    may_change: bool
    #: The peer's pidfd; None if it had already exited when we accepted it.
    process: int | None
    at_end: list[Callable[[], None]] = field(default_factory=list)


#: The most clients at a time. Some places are only for root outside of pods, so that the containers' hook and root's
#: qgpuctl can always connect.
MAX_CLIENTS, FOR_ROOT = 512, 64
#: Limits for guests, which are clients that may only read or are in a pod: for all guests, for all pods, per user and
#: per pod. Guests take no place from other clients. All ids that are subordinate to a user count as one more user.
MAX_GUESTS, MAX_OF_PODS, MAX_OF_USER, MAX_OF_POD = 128, 64, 16, 8
#: A client that is not root or the daemon's own user outside of pods may send at most this many bytes at once. It must
#: finish a message, and take its answer, within this time. A guest must also begin a message within it; other clients
#: may be silent, as launchers of pods are.
_MOST_BYTES, _TIMEOUT_S = 1 << 16, 30.0
#: The most bytes that root and the daemon's own user may send at once: no other Python thread runs while a message is
#: parsed. Their largest message has a container's environment, which the kernel bounds to a quarter of a program's
#: stack: usually 2 MiB.
_MOST_OWN_BYTES = 1 << 22
#: The daemon answers guests one at a time, because answering takes time from the scheduling loops and the data plane.
#: The pause before the next answer is a multiple of the time that the last one took, within these bounds. Messages of
#: bounded size are parsed one at a time, too, with a pause of the same multiple of the parsing time.
_GUEST_PAUSE_S, _MOST_GUEST_PAUSE_S, _PAUSES = 0.005, 1.0, 4
_MOMENT_S = 0.001
#: If a message of bounded size has arrived in part, the next read follows after a pause, which doubles each time: a
#: client may send it byte by byte.
_PART_PAUSE_S, _MOST_PART_PAUSE_S = 0.005, 0.1

#: Answers one request. A handler removes descriptors that it keeps from the list; the rest are closed.
Handler = Callable[[Session, dict[str, Any], list[int]], dict[str, Any]]


def _connect_as_root(runtime_dir: Path, timeout_s: float) -> wire.Connection | None:
    """Connect to root's own socket, which other users cannot fill; None if there is none. Raises TimeoutError."""
    if os.geteuid() != 0:
        return None
    try:
        return wire.connect(str(root_socket_path(runtime_dir)), timeout_s)
    except TimeoutError:
        raise
    except OSError:
        return None


class Server:
    """Listens on root's control socket and on that of all users, and serves each client in a thread of its own."""

    def __init__(
        self,
        runtime_dir: Path,
        mode: int,
        group_id: int | None,
        handle: Handler,
        store: FdStore,
        pod_of: Callable[[Session], str] = lambda _: "",
    ) -> None:
        """Listen. ``pod_of`` returns a client's pod without blocking; a client in a pod is a guest.

        Raises InvalidValueError, PermissionDeniedError if no client could connect.
        """
        self._handle = handle
        self._pod_of = pod_of
        self._limits = ClientLimits()
        #: Held while a message of bounded size is parsed, and for a pause after it.
        self._parsing = threading.Lock()
        self._guests_turn, self._guests_pause_s = threading.Lock(), _GUEST_PAUSE_S
        self._group_id = group_id
        self._path = path = socket_path(runtime_dir)
        self._listeners = [SocketListener("control", path, mode, store, self._take)]
        try:
            self._give_to_group()
            self._listeners.append(SocketListener("root", root_socket_path(runtime_dir), 0o600, store, self._take))
        except QgpuError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise PermissionDeniedError(
                f"{path}: {error.strerror}; to give it to group {group_id}, run qgpud as root or as its member"
            ) from error

    @property
    def reachable(self) -> bool:
        """Tell whether clients still find the socket."""
        return all(listener.reachable for listener in self._listeners)

    def restore(self) -> None:
        """Listen again if somebody removed the socket. Raises OSError."""
        for listener in self._listeners:
            listener.restore()
        self._give_to_group()

    def _give_to_group(self) -> None:
        if self._group_id is not None:
            shutil.chown(self._path, group=self._group_id)

    def close(self) -> None:
        """Accept no more clients."""
        for listener in self._listeners:
            listener.close()

    def _take(self, sock: socket.socket) -> None:
        """Serve a client in a thread of its own, if the limits allow it."""
        connection = wire.Connection(sock)
        session = Session(connection.peer(), self._may_change(connection), _process(connection))
        pod = self._pod_of(session)
        guest, limits = bool(pod) or not session.may_change, self._kinds(session, pod)
        full = self._limits.acquire(limits)
        try:
            if full is not None:
                raise RuntimeError(f"limit reached: {full}")
            try:
                thread = threading.Thread(target=self._serve, args=(connection, session, limits, guest), name="client")
                thread.daemon = True
                thread.start()
            except BaseException:
                self._limits.release(limits)
                raise
        except RuntimeError as error:  # or no thread is available
            _log.warning("client refused", pid=session.peer.pid, uid=session.peer.uid, reason=str(error))
            with suppress(OSError):
                connection.send(_refusal("qgpud: too many clients; try again", ExitCode.REFUSED))
            if session.process is not None:
                os.close(session.process)
            untrusted_fds.close(*connection.detach())

    def _serve(self, connection: wire.Connection, session: Session, limits: Mapping[str, int], guest: bool) -> None:
        bounded = guest or not is_own_user(session.peer.uid)
        try:
            connection.sock.setblocking(True)
            connection.max_message = _MOST_BYTES if bounded else _MOST_OWN_BYTES
            if guest:
                connection.max_fds = 0
            while (received := self._next(connection, guest) if bounded else connection.receive()) is not None:
                message, fds = received
                try:
                    if connection.hung_up:  # its user was told that there was no answer, so nothing may change now
                        break
                    connection.send((self._answer_guest if guest else self._answer)(session, message, fds))
                finally:
                    untrusted_fds.close_here(*fds)
        except OSError:
            pass  # a client that left expects no answer
        except wire.WireError as error:  # nor does one that sent no valid message
            if not bounded:
                _log.warning("client refused", pid=session.peer.pid, uid=session.peer.uid, reason=str(error))
        finally:
            with ExitStack() as last:  # each callback runs even if another fails; the first one runs last
                last.callback(self._limits.release, limits)
                last.callback(lambda: untrusted_fds.close_here(*connection.detach()))
                if session.process is not None:
                    last.callback(os.close, session.process)
                for call in session.at_end:
                    last.callback(call)

    def _next(self, connection: wire.Connection, guest: bool) -> tuple[dict[str, Any], list[int]] | None:
        """Wait for a request. A guest's must begin, and each must be complete, in time. Raises OSError, WireError."""
        if not guest and not connection.unread:
            connection.sock.settimeout(None)
            if not connection.fill():
                return None
        deadline, pause_s = time.monotonic() + _TIMEOUT_S, 0.0
        while (received := self._parsed(connection)) is None:
            if connection.unread:
                pause_s = min(max(2 * pause_s, _PART_PAUSE_S), _MOST_PART_PAUSE_S)
                time.sleep(pause_s)
            connection.sock.settimeout(max(deadline - time.monotonic(), _MOMENT_S))
            if time.monotonic() > deadline or not connection.fill():
                return None
        connection.sock.settimeout(_TIMEOUT_S)  # for the answer
        return received

    def _parsed(self, connection: wire.Connection) -> tuple[dict[str, Any], list[int]] | None:
        """Wait for this connection's turn; return a request that has arrived completely, or None. Raises WireError."""
        with self._parsing:
            began_s = time.thread_time()
            try:
                return connection.next_buffered()
            finally:
                time.sleep(_PAUSES * (time.thread_time() - began_s))

    def _answer_guest(self, session: Session, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Answer a guest when it is its turn."""
        with self._guests_turn:
            time.sleep(self._guests_pause_s)
            began_s = time.monotonic()
            answer = self._answer(session, message, fds)
            took_s = time.monotonic() - began_s
            self._guests_pause_s = min(max(_GUEST_PAUSE_S, _PAUSES * took_s), _MOST_GUEST_PAUSE_S)
        return answer

    def _answer(self, session: Session, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        try:
            return {"ok": True, "schema": SCHEMA, **self._handle(session, message, fds)}
        except QgpuError as error:
            return _refusal(str(error), error.code)
        except Exception as error:  # noqa: BLE001 - a defect: the client gets the error
            _log.exception("request failed", op=str(message.get("op")))
            return _refusal(f"qgpud: {error!r}; see its log", ExitCode.FAILED)

    def _kinds(self, session: Session, pod: str) -> dict[str, int]:
        """Return the kinds that a client belongs to, each with the most clients allowed."""
        uid, others, places = session.peer.uid, "non-root clients", MAX_CLIENTS - FOR_ROOT
        user = subordinate_uids.owner(uid)
        if pod:
            here = {"processes of pods": MAX_OF_PODS, f"processes of pod {pod}": MAX_OF_POD}
        elif not session.may_change:
            here = {"guests": MAX_GUESTS, f"guests of user {user}": MAX_OF_USER}
        elif not is_own_user(uid):  # each of the user's pods may take a place, by its launcher's connection
            kind = f"clients of user {user}"
            here = {kind: self._limits.fair_part(kind, others, places)}
        else:
            here = {}
        if uid != 0 or pod:
            here[others] = places
        return here | {"clients": MAX_CLIENTS}

    def _may_change(self, connection: wire.Connection) -> bool:
        peer = connection.peer()
        return is_own_user(peer.uid) or (
            self._group_id is not None and self._group_id in (peer.gid, *_groups(connection.sock))
        )


def is_own_user(uid: int) -> bool:
    """Tell whether a user is root or the daemon's own."""
    return uid in (0, os.geteuid())


def _process(connection: wire.Connection) -> int | None:
    try:
        return connection.peer_process()
    except OSError:
        return None


def _refusal(error: str, code: ExitCode) -> dict[str, Any]:
    return {"ok": False, "schema": SCHEMA, "error": error, "code": int(code)}


def _groups(sock: socket.socket) -> tuple[int, ...]:
    """Return the peer's supplementary groups, as of its connection; none if there are too many."""
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_BYTES)
    except OSError:  # ERANGE: in doubt, deny
        return ()
    return struct.unpack(f"{len(data) // 4}I", data)
