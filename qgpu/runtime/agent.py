"""The seccomp agent: receives the listeners that container runtimes hand over (OCI ``linux.seccomp.listenerPath``).

A runtime connects, sends the container process state as JSON together with the listener's descriptor, and does not
wait for an answer. So the agent keeps each connection in the descriptor store until a pod has the listener, and only
peeks at the data: if the daemon dies meanwhile, the next daemon reads the same message. While the data plane is being
replaced, the agent tries again, until its deadline.

A runtime never runs in a pod, so the agent refuses senders that are in a pod, also root there. A sender that has ended
may have been in a pod; the agent does not wait for the rest of its message.

If no pod takes the listener, the agent closes it. Every watched call of that process then fails, so the process has no
GPU instead of one without limits.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from qgpu.errors import BackendGoneError, QgpuError
from qgpu.ipc import wire
from qgpu.ipc.listener import SocketListener
from qgpu.ipc.systemd import FdStore
from qgpu.linux import untrusted_fds
from qgpu.runtime.oci_hook import RETRY_S

_log = structlog.get_logger("agent")

_MAX_STATE = 1 << 20
#: The size of a descriptor in a control message.
_INT = array("i").itemsize
#: How long a runtime may take to send its message.
_SILENCE_S = 5.0
#: How long a listener waits for the data plane: longer than the hook, because a refused process never gets a GPU.
_TIMEOUT_S = 30.0
_SECCOMP_FD = "seccompFd"

#: The kernel's name of a listener, as /proc/PID/fd shows it.
LISTENER = "anon_inode:seccomp notify"

#: The prefix of connections' names in the store; a number follows.
_KEPT = "start."

#: Takes a copy of the listener of a process: (pid, container id, descriptor). A second call changes nothing. Raises
#: BackendGoneError if the agent should call again, QgpuError to refuse. For a process that enters by exec, crun 1.8
#: does not know the pid, and sends 0.
Attach = Callable[[int, str, int], None]
#: Returns the pod of a process, given its pid, and its pidfd unless it has ended; empty for none, UNKNOWN for a process
#: that has ended.
PodOf = Callable[[int, int | None], str]
UNKNOWN = "?"


class Agent:
    """Listens at a socket and takes seccomp listeners one at a time."""

    def __init__(self, path: Path, attach: Attach, store: FdStore, pod_of: PodOf = lambda _pid, _process: "") -> None:
        self._attach, self._store, self._pod_of = attach, store, pod_of
        self._ending = threading.Event()
        left = [socket.socket(fileno=fd) for fd in store.take(_KEPT).values()]
        self._listener = SocketListener("agent", path, 0o600, store, self._hear, left)

    def restore(self) -> None:
        """Listen again if somebody removed the socket. Raises OSError."""
        self._listener.restore()

    def close(self) -> None:
        """Accept no more listeners; leave unfinished connections to the next daemon."""
        self._ending.set()
        self._listener.close()

    def _hear(self, sock: socket.socket) -> None:
        pod = self._pod_at(sock)
        if pod not in ("", UNKNOWN):
            _log.warning("listener refused, its sender is in a pod", pod=pod)
            untrusted_fds.close(sock.detach())
            return
        name = f"{_KEPT}{os.fstat(sock.fileno()).st_ino}"
        self._store.put(name, sock.fileno(), until_dropped=True)  # first, because this process may die at any time
        done = True
        try:
            sock.settimeout(0.0 if pod else _SILENCE_S)
            done = self._take(sock)
        finally:
            if done:
                self._store.drop(name)
            untrusted_fds.close(sock.detach())

    def _pod_at(self, sock: socket.socket) -> str:
        """Return the pod of the peer, which the kernel names; empty for none."""
        connection, process = wire.Connection(sock), None
        with suppress(OSError):
            process = connection.peer_process()
        try:
            return self._pod_of(connection.peer().pid, process)
        finally:
            if process is not None:
                os.close(process)

    def _take(self, sock: socket.socket) -> bool:
        """Serve a connection; return False if the next daemon has to."""
        fds: list[int] = []
        try:
            state = _received(sock, fds)
            pid, listener = int(state["pid"]), fds[state["fds"].index(_SECCOMP_FD)]
            container = str(state["state"]["id"])
            if untrusted_fds.kind(listener) != LISTENER:
                raise ValueError(f"{untrusted_fds.kind(listener)} in place of a listener")
            return self._attached(pid, container, listener)
        except QgpuError as error:
            _log.error("container process refused; it has no GPU", error=str(error))
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            _log.error("no container process state", error=repr(error))
        finally:
            untrusted_fds.close(*fds)
        return True

    def _attached(self, pid: int, container: str, listener: int) -> bool:
        """Give a listener to its pod; return False if the daemon ends first. Raises QgpuError."""
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                self._attach(pid, container, listener)
            except BackendGoneError:
                if time.monotonic() > deadline:
                    raise
            else:
                return True
            if self._ending.wait(RETRY_S):
                return False


def _received(sock: socket.socket, fds: list[int]) -> Any:
    """Read one JSON value, even if the connection stays open after it. Append received descriptors to ``fds``.

    A value that has arrived in one piece, as runtimes send it, stays in the socket and can be read again.
    """
    # recv_fds() ignores its flags
    part, control, _, _ = sock.recvmsg(65536, socket.CMSG_LEN(4 * _INT), socket.MSG_PEEK)
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += array("i", data[: len(data) // _INT * _INT])
    with suppress(ValueError):
        return json.loads(part)
    said = b""
    while len(said) <= _MAX_STATE:
        part, received, _, _ = socket.recv_fds(sock, 65536, 4)
        fds += received
        said += part
        try:
            return json.loads(said)
        except ValueError:
            if not part:
                raise
    raise ValueError(f"more than {_MAX_STATE} bytes")
