"""What qgpu says to systemd and gets back from it, without its library; silence where nobody listens.

Two things: words (sd_notify(3): ready, alive, stopping) and the descriptor store, in which descriptors outlive the
daemon, however it ended, until the service is stopped. What is stored, and what for, is its owner's to decide.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from qgpu.ipc import wire

_FIRST_FD = 3  # sd_listen_fds(3)
#: What is sent again and again.
ALIVE = "WATCHDOG=1"


def notify(state: str, fds: tuple[int, ...] = ()) -> None:
    """Send ``state``, such as ``READY=1`` or ``WATCHDOG=1``, to the service manager if there is one.

    A sign of life is not waited for until there is room: another follows.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] in ("/", "@"):
        # an address that was inherited from another service: nobody is there, or nobody who listens to us
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect("\0" + address[1:] if address[0] == "@" else address)
            sock.setblocking(state != ALIVE)
            socket.send_fds(sock, [state.encode()], fds) if fds else sock.send(state.encode())


def to_journal() -> bool:
    """Tell whether what is written on stderr goes to the journal."""
    stat = os.fstat(sys.stderr.fileno())
    return os.environ.get("JOURNAL_STREAM") == f"{stat.st_dev}:{stat.st_ino}"


class FdStore:
    """The descriptor store: what a former daemon put in is there to be taken, by name."""

    def __init__(self) -> None:
        #: Whether there is a store at all.
        self.there = bool(os.environ.get("NOTIFY_SOCKET"))
        self._found: dict[str, int] = {}
        names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
        mine = os.environ.pop("LISTEN_PID", "") == str(os.getpid())
        count = os.environ.pop("LISTEN_FDS", "0")
        if mine and count.isdecimal():
            for fd, name in zip(range(_FIRST_FD, _FIRST_FD + int(count)), names, strict=False):
                os.set_inheritable(fd, False)
                self._found[name] = fd

    def put(self, name: str, fd: int) -> None:
        """Have a copy of a descriptor kept; putting the same one again does no harm."""
        notify(f"FDSTORE=1\nFDNAME={name}", (fd,))

    def drop(self, name: str) -> None:
        """Have what is kept under a name closed."""
        notify(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def listen(self, name: str, path: Path, mode: int) -> socket.socket:
        """Listen at a path; with a former daemon's socket if it was kept, so that who connected meanwhile waits."""
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
        """Take over the descriptors whose names begin with ``prefix``, by the rest of their names."""
        taken = {name: self._found.pop(name) for name in list(self._found) if name.startswith(prefix)}
        return {name.removeprefix(prefix): fd for name, fd in taken.items()}
