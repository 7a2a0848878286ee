"""The seccomp agent: receives the listeners that container runtimes hand over (OCI ``linux.seccomp.listenerPath``).

A runtime connects, sends the container process state as JSON together with the listener's descriptor, and does not
wait for an answer. If no pod takes the listener, the agent closes it. Every watched call of that process then fails, so
the process has no GPU instead of one without limits.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from qgpu.errors import QgpuError
from qgpu.ipc.listener import SocketListener
from qgpu.ipc.systemd import FdStore
from qgpu.linux import untrusted_fds

_log = structlog.get_logger("agent")

_MAX_STATE = 1 << 20
_PATIENCE_S = 5.0
_SECCOMP_FD = "seccompFd"

#: The kernel's name of a listener, as /proc/PID/fd shows it.
LISTENER = "anon_inode:seccomp notify"

#: Takes over the listener of a process: (pid, container id, descriptor). Raises QgpuError, and then has closed it.
#: crun 1.8 does not know the pid of a process that it brings in by exec, and says 0.
Attach = Callable[[int, str, int], None]


class Agent:
    """Listens at a socket and takes seccomp listeners one at a time."""

    def __init__(self, path: Path, attach: Attach, store: FdStore) -> None:
        self._attach = attach
        self._door = SocketListener("agent", path, 0o600, store, self._hear)

    def close(self) -> None:
        """Accept no more listeners."""
        self._door.close()

    def _hear(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(_PATIENCE_S)
            self._take(sock)
        finally:
            untrusted_fds.close(sock.detach())

    def _take(self, sock: socket.socket) -> None:
        fds: list[int] = []
        try:
            state = _received(sock, fds)
            pid, listener = int(state["pid"]), fds[state["fds"].index(_SECCOMP_FD)]
            container = str(state["state"]["id"])
            if untrusted_fds.kind(listener) != LISTENER:
                raise ValueError(f"{untrusted_fds.kind(listener)} in place of a listener")
            fds.remove(listener)
            self._attach(pid, container, listener)
        except QgpuError as error:
            _log.error("container process refused; it has no GPU", error=str(error))
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            _log.error("no container process state", error=repr(error))
        finally:
            untrusted_fds.close(*fds)


def _received(sock: socket.socket, fds: list[int]) -> Any:
    """Read one JSON value, even if the connection stays open after it. Append received descriptors to ``fds``."""
    data = b""
    while len(data) <= _MAX_STATE:
        part, received, _, _ = socket.recv_fds(sock, 65536, 4)
        fds += received
        data += part
        try:
            return json.loads(data)
        except ValueError:
            if not part:
                raise
    raise ValueError(f"more than {_MAX_STATE} bytes")
