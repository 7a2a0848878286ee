"""A listening socket with a thread that passes on each connection.

With a descriptor store, the socket outlives the daemon there, and clients that connect meanwhile wait. The receiver of
a connection decides what to do with it.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from qgpu.errors import PermissionDeniedError
from qgpu.ipc.systemd import FdStore
from qgpu.linux import untrusted_fds

_log = structlog.get_logger("door")

#: How long to pause when no descriptor is free.
_NO_FD_PAUSE_S = 0.1
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SocketListener:
    """Listens at a path; ``take`` gets each connection, and closes it."""

    def __init__(self, name: str, path: Path, mode: int, store: FdStore, take: Callable[[socket.socket], None]) -> None:
        """Listen, with the stored socket of this ``name`` if there is one. Raises PermissionDeniedError."""
        self._path = path
        self._take = take
        self._stored = store.there
        try:
            self._listener = store.listen(name, path, mode)
        except OSError as error:
            raise PermissionDeniedError(f"{path}: {error.strerror}; no client could connect there") from error
        self._listener.setblocking(False)
        self._over = os.eventfd(0)
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more clients; remove the socket unless the store keeps it."""
        if not self._stored:
            self._path.unlink(missing_ok=True)
        os.eventfd_write(self._over, 1)  # not shutdown(), which would end the stored socket too
        self._thread.join()
        self._listener.close()
        os.close(self._over)

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._over, select.POLLIN)
        while all(fd != self._over for fd, _ in poll.poll()):
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    _log.error("no free descriptor, trying again", path=str(self._path))
                    time.sleep(_NO_FD_PAUSE_S)
                continue  # otherwise the client is gone
            try:
                self._take(sock)
            except Exception:  # noqa: BLE001 - a defect: the next client must still be accepted
                _log.exception("client dropped", path=str(self._path))
                if (fd := sock.detach()) >= 0:
                    untrusted_fds.close(fd)
