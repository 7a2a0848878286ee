"""Messages between qgpu's own processes: length-prefixed JSON over a unix stream socket, with descriptors.

One message is a 4-byte little-endian length and that many bytes of UTF-8 JSON (an object). Descriptors ride
on the first byte of a message (SCM_RIGHTS). Nothing here knows what messages mean.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

#: Larger messages are refused unread: no message of qgpu's comes near it.
MAX_MESSAGE = 16 * 1024 * 1024
_MAX_FDS = 16
_LENGTH = struct.Struct("<I")
_PEER = struct.Struct("iII")
_SO_PEERPIDFD = 77  # include/uapi/asm-generic/socket.h; Python has no name for it


class WireError(Exception):
    """The peer sent something that is no message."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as the kernel vouches for it (SO_PEERCRED at connect time)."""

    pid: int
    uid: int
    gid: int


@dataclass(slots=True)
class Connection:
    """One end of a connection; both ends are alike."""

    sock: socket.socket
    _data: bytearray = field(default_factory=bytearray)
    #: Descriptors that have come, each with where in the stream the read that brought it ended.
    _fds: list[tuple[int, int]] = field(default_factory=list)
    #: Where in the stream ``_data`` begins.
    _at: int = 0
    #: Larger messages are refused unread.
    max_message: int = MAX_MESSAGE
    #: Descriptors that are taken in at a time; the kernel drops what comes where there are to be none.
    max_fds: int = _MAX_FDS

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self.sock.fileno()

    def peer(self) -> Peer:
        """Return the peer's credentials."""
        return Peer(*_PEER.unpack(self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)))

    def peer_process(self) -> int:
        """Return a pidfd of the process that connected, to be closed; numbers are given out again, pidfds are not.

        Before Linux 6.5 it is of whoever has its number by now. Raises OSError when it has ended.
        """
        try:
            return self.sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:
                raise
        return os.pidfd_open(self.peer().pid)

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send one message. Raises OSError when the peer is gone."""
        body = json.dumps(message, separators=(",", ":")).encode()
        data = _LENGTH.pack(len(body)) + body
        sent = socket.send_fds(self.sock, [data], list(fds)) if fds else self.sock.send(data)
        if sent < len(data):
            self.sock.sendall(memoryview(data)[sent:])

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message with its descriptors (the caller closes them), or None at the end.

        Raises WireError for what is no message, TimeoutError when the socket's timeout runs out.
        """
        while (message := self.next_buffered()) is None:
            if not self.fill():
                return None
        return message

    def next_buffered(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return a message that has arrived whole already, or None. Raises WireError."""
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > self.max_message:
            raise WireError(f"message of {length} bytes")
        if len(self._data) < _LENGTH.size + length:
            return None
        body = bytes(self._data[_LENGTH.size : _LENGTH.size + length])
        del self._data[: _LENGTH.size + length]
        self._at += _LENGTH.size + length
        fds = self._take_fds()
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            self._keep(fds)
            raise WireError("not JSON") from error
        if not isinstance(message, dict):
            self._keep(fds)
            raise WireError("not a JSON object")
        return message, fds

    def fill(self) -> bool:
        """Read what has arrived; False at the end of the stream. Raises WireError for a hoard of descriptors."""
        try:
            if self.max_fds:
                data, fds, _, _ = socket.recv_fds(self.sock, 65536, self.max_fds)
            else:
                data, fds = self.sock.recv(65536), []
        except ConnectionResetError:
            return False
        self._data += data
        self._fds += [(self._at + len(self._data), fd) for fd in fds]
        if len(self._fds) > _MAX_FDS:
            raise WireError("more descriptors than a message has")
        return bool(data)

    def _take_fds(self) -> list[int]:
        """Take the descriptors of the message that ends here.

        One read may bring several messages, but ends with the one that has descriptors (unix_stream_read_generic in
        net/unix/af_unix.c stops behind it): so they are those of the last message that began in it.
        """
        mine = [fd for end, fd in self._fds if end <= self._at]
        self._fds = [(end, fd) for end, fd in self._fds if end > self._at]
        return mine

    def _keep(self, fds: list[int]) -> None:
        """Leave descriptors of a message that is none to whoever closes the connection."""
        self._fds += [(self._at, fd) for fd in fds]

    def close(self) -> None:
        """Close the socket and every descriptor nobody took: of a connection with another process of ours."""
        fds, self._fds = self._fds, []
        for _, fd in fds:
            os.close(fd)
        self.sock.close()

    def detach(self) -> list[int]:
        """Hang up; return the socket and every descriptor nobody took, to be closed: a peer may have sent anything."""
        fds, self._fds = self._fds, []
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        mine = self.sock.detach()
        return [*(fd for _, fd in fds), *([mine] if mine >= 0 else [])]


def connect(path: str, timeout_s: float | None = None) -> Connection:
    """Connect to a listening socket. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(timeout_s)
    try:
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return Connection(sock)


def listen(path: str, mode: int) -> socket.socket:
    """Listen at ``path`` with file ``mode``, in place of a dead socket that may lie there. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    temporary = f"{path}.{os.getpid()}"
    try:
        with suppress(FileNotFoundError):
            os.unlink(temporary)  # of one that was killed in between and had our number, as in a container
        sock.bind(temporary)
        os.chmod(temporary, mode)
        sock.listen(64)
        os.rename(temporary, path)
    except BaseException:
        sock.close()
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return sock


def has_ended(pidfd: int) -> bool:
    """Tell whether the process behind a pidfd has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
