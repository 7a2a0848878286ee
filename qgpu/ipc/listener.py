"""A listening socket with a thread that passes on each connection.

With a descriptor store, the socket outlives the daemon, and clients that connect meanwhile wait. The receiver of a
connection decides what to do with it.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import structlog

from qgpu.errors import unusable
from qgpu.ipc.systemd import FdStore
from qgpu.linux import untrusted_fds

_log = structlog.get_logger("listener")

#: How long to pause when no descriptor is free.
_NO_FD_PAUSE_S = 0.1
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SocketListener:
    """Listens at a path; ``take`` gets each connection, and closes it."""

    def __init__(
        self,
        name: str,
        path: Path,
        mode: int,
        store: FdStore,
        take: Callable[[socket.socket], None],
        left: Iterable[socket.socket] = (),
    ) -> None:
        """Listen, with the stored socket of this ``name`` if there is one.

        ``left`` are connections that an earlier daemon accepted and did not finish; they come first. Raises
        InvalidValueError, PermissionDeniedError.
        """
        self._path = path
        self._take, self._left = take, left
        self._listen = partial(store.listen, name, path, mode)
        self._stored, self._closed = store.there, False
        try:
            self._listener = self._listen()
        except OSError as error:
            raise unusable(path, "no client could connect there", error) from error
        self._listener.setblocking(False)
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    @property
    def reachable(self) -> bool:
        """Tell whether the socket's file is still there."""
        return self._path.is_socket()

    def restore(self) -> None:
        """Listen again if the socket's file was removed, perhaps with its directory. Raises OSError."""
        if self.reachable:
            return
        listener, old = self._listen(), self._listener
        listener.setblocking(False)
        self._listener = listener
        os.eventfd_write(self._wake, 1)
        old.close()

    def close(self) -> None:
        """Accept no more clients; remove the socket unless the store keeps it."""
        if not self._stored:
            self._path.unlink(missing_ok=True)
        self._closed = True
        os.eventfd_write(self._wake, 1)  # not shutdown(), which would end the stored socket too
        self._thread.join()
        self._listener.close()
        os.close(self._wake)

    def _accept(self) -> None:
        for sock in self._left:
            self._pass_on(sock)
        while not self._closed:
            listener = self._listener
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            try:
                poll.register(listener, select.POLLIN)
            except ValueError:  # restore() has just closed it
                continue
            if any(fd == self._wake for fd, _ in poll.poll()):
                os.eventfd_read(self._wake)
                continue
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    _log.error("no free descriptor, trying again", path=str(self._path))
                    time.sleep(_NO_FD_PAUSE_S)
                continue  # otherwise the client is gone
            self._pass_on(sock)

    def _pass_on(self, sock: socket.socket) -> None:
        try:
            self._take(sock)
        except Exception:  # noqa: BLE001 - a defect: the next client must still be accepted
            _log.exception("client dropped", path=str(self._path))
            if (fd := sock.detach()) >= 0:
                untrusted_fds.close(fd)
