"""The systemd protocols that qgpu uses, without libsystemd; without systemd they do nothing.

There are two: status messages (sd_notify(3): ready, alive, stopping) and the descriptor store. Stored descriptors
outlive the daemon, however it ended, until the service is stopped. Their owner decides what to store.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from qgpu.ipc import wire

_FIRST_FD = 3  # sd_listen_fds(3)
#: The sign of life, which is sent repeatedly.
ALIVE = "WATCHDOG=1"


def notify(state: str, fds: tuple[int, ...] = ()) -> None:
    """Send ``state``, such as ``READY=1`` or ``WATCHDOG=1``, to the service manager, if there is one.

    A sign of life does not wait for room in the socket's queue, because another one follows.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] in ("/", "@"):
        # the address may be inherited from another service, where nothing listens
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect("\0" + address[1:] if address[0] == "@" else address)
            sock.setblocking(state != ALIVE)
            socket.send_fds(sock, [state.encode()], fds) if fds else sock.send(state.encode())


def to_journal() -> bool:
    """Tell whether stderr goes to the journal."""
    stat = os.fstat(sys.stderr.fileno())
    return os.environ.get("JOURNAL_STREAM") == f"{stat.st_dev}:{stat.st_ino}"


class FdStore:
    """The descriptor store: what an earlier daemon stored can be taken by name."""

    def __init__(self) -> None:
        #: Whether there is a store.
        self.there = bool(os.environ.get("NOTIFY_SOCKET"))
        self._found: dict[str, int] = {}
        names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
        mine = os.environ.pop("LISTEN_PID", "") == str(os.getpid())
        count = os.environ.pop("LISTEN_FDS", "0")
        if mine and count.isdecimal():
            for fd, name in zip(range(_FIRST_FD, _FIRST_FD + int(count)), names, strict=False):
                os.set_inheritable(fd, False)
                self._found[name] = fd

    def put(self, name: str, fd: int, *, until_dropped: bool = False) -> None:
        """Store a copy of a descriptor; storing it again changes nothing.

        ``until_dropped`` keeps one that nobody writes to any more, which the service manager otherwise lets go.
        """
        notify(f"FDSTORE=1\nFDPOLL={int(not until_dropped)}\nFDNAME={name}", (fd,))

    def drop(self, name: str) -> None:
        """Close what is stored under a name."""
        notify(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def listen(self, name: str, path: Path, mode: int) -> socket.socket:
        """Listen at a path, with an earlier daemon's socket if it is stored, so that waiting clients are served."""
        found = self.take(name).get("")
        if found is not None and path.is_socket():
            listener = socket.socket(fileno=found)
            path.chmod(mode)
        else:
            listener = wire.listen(str(path), mode)
            self.drop(name)
        self.put(name, listener.fileno())
        return listener

    def take(self, prefix: str) -> dict[str, int]:
        """Take the descriptors whose names start with ``prefix``, by the rest of their names."""
        taken = {name: self._found.pop(name) for name in list(self._found) if name.startswith(prefix)}
        return {name.removeprefix(prefix): fd for name, fd in taken.items()}
