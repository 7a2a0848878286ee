"""The systemd protocols that qgpu uses, without libsystemd; without systemd they do nothing.

There are two: status messages (sd_notify(3): ready, alive, stopping) and the descriptor store. Stored descriptors
outlive the daemon, however it ended, until the service is stopped. Storing never waits, so callers may hold a lock: a
thread sends what a busy service manager does not take at once, in the same order.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

from qgpu.ipc import wire

_FIRST_FD = 3  # sd_listen_fds(3)
#: The watchdog signal, which is sent repeatedly.
ALIVE = "WATCHDOG=1"


def notify(state: str) -> None:
    """Send ``state``, such as ``READY=1`` or ``WATCHDOG=1``, to the service manager, if there is one.

    A watchdog signal does not wait for room in the socket's queue, because another one follows.
    """
    _send(state, (), wait=state != ALIVE)


def _send(state: str, fds: tuple[int, ...], *, wait: bool) -> bool:
    """Send a message with descriptors. Without ``wait``, return False if the queue has no room."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] in ("/", "@"):
        # the address may be inherited from another service, where nothing listens
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect("\0" + address[1:] if address[0] == "@" else address)
            sock.setblocking(wait)
            try:
                socket.send_fds(sock, [state.encode()], fds) if fds else sock.send(state.encode())
            except BlockingIOError:
                return False
    return True


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
        #: What the service manager has not taken yet, with copies of the descriptors; a thread sends it.
        self._unsent: deque[tuple[str, tuple[int, ...]]] = deque()
        self._sending = False
        self._lock = threading.Lock()
        names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
        mine = os.environ.pop("LISTEN_PID", "") == str(os.getpid())
        count = os.environ.pop("LISTEN_FDS", "0")
        if mine and count.isdecimal():
            for fd, name in zip(range(_FIRST_FD, _FIRST_FD + int(count)), names, strict=False):
                os.set_inheritable(fd, False)
                self._found[name] = fd

    def put(self, name: str, fd: int, *, until_dropped: bool = False) -> None:
        """Store a copy of a descriptor; storing it again changes nothing.

        By default, the service manager closes a descriptor whose other end was closed; ``until_dropped`` keeps it.
        """
        self._tell(f"FDSTORE=1\nFDPOLL={int(not until_dropped)}\nFDNAME={name}", (fd,))

    def drop(self, name: str) -> None:
        """Close what is stored under a name."""
        self._tell(f"FDSTOREREMOVE=1\nFDNAME={name}")

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

    def _tell(self, state: str, fds: tuple[int, ...] = ()) -> None:
        with self._lock:
            if not self._unsent and _send(state, fds, wait=False):
                return
            try:
                copies = tuple(map(os.dup, fds))
            except OSError:  # no descriptor is free: the next daemon gets this one from the guardian
                return
            self._unsent.append((state, copies))
            if self._sending:
                return
            self._sending = True
        try:
            threading.Thread(target=self._send_rest, name="fd-store").start()  # the daemon's end waits for it
        except RuntimeError:  # no thread is available: the next call tries again
            self._sending = False

    def _send_rest(self) -> None:
        while self._sending:
            state, fds = self._unsent[0]
            _send(state, fds, wait=True)
            for fd in fds:
                os.close(fd)
            with self._lock:
                self._unsent.popleft()
                self._sending = bool(self._unsent)
