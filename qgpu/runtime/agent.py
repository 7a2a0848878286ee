"""The seccomp agent: takes the listeners that container runtimes hand over (OCI ``linux.seccomp.listenerPath``).

A runtime connects, sends the container process state as JSON with the listener's descriptor on it, and goes on
without waiting for an answer. A listener that nobody takes over is closed: then every watched call of that process
fails, and it has no GPU rather than one without limits.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from qgpu.errors import QgpuError
from qgpu.systemd import Store

_log = structlog.get_logger("agent")

_MAX_STATE = 1 << 20
_PATIENCE_S = 5.0
#: How long to wait when there is no room for another descriptor.
_BREATH_S = 0.1
_SECCOMP_FD = "seccompFd"

#: Takes over the listener of a process: (pid, container id, descriptor). Raises QgpuError, and then has closed it.
#: crun 1.8 does not know the pid of a process that it brings in by exec, and says 0.
Attach = Callable[[int, str, int], None]


class Agent:
    """Listens at a socket, in a thread of its own."""

    def __init__(self, path: Path, attach: Attach, store: Store) -> None:
        self._path = path
        self._attach = attach
        self._stored = store.there
        self._listening = store.listen("agent", path, 0o600)
        self._listening.setblocking(False)
        self._over = os.eventfd(0)
        self._thread = threading.Thread(target=self._accept, name="seccomp-agent", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more listeners."""
        if not self._stored:
            self._path.unlink(missing_ok=True)
        os.eventfd_write(self._over, 1)
        self._thread.join()
        self._listening.close()
        os.close(self._over)

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listening, select.POLLIN)
        poll.register(self._over, select.POLLIN)
        while all(fd != self._over for fd, _ in poll.poll()):
            try:
                sock, _ = self._listening.accept()
            except OSError as error:
                _log.error("cannot take a listener, trying again", error=str(error))
                time.sleep(_BREATH_S)
                continue
            with sock:
                sock.settimeout(_PATIENCE_S)
                self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        fds: list[int] = []
        try:
            state = _received(sock, fds)
            pid, listener = int(state["pid"]), fds[state["fds"].index(_SECCOMP_FD)]
            container = str(state["state"]["id"])
            fds.remove(listener)
            self._attach(pid, container, listener)
        except QgpuError as error:
            _log.error("container process refused; it has no GPU", error=str(error))
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            _log.error("no container process state", error=repr(error))
        finally:
            for fd in fds:
                os.close(fd)


def _received(sock: socket.socket, fds: list[int]) -> Any:
    """Read one JSON value, whether the runtime hangs up behind it or not; descriptors go to ``fds`` as they come."""
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
