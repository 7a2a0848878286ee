"""Messages between qgpu's processes: length-prefixed JSON over a unix stream socket, with descriptors.

A message is a 4-byte little-endian length and that many bytes of UTF-8 JSON (an object). Its descriptors travel with
its first byte (SCM_RIGHTS). This file does not interpret messages.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

#: The largest message in bytes; larger ones are refused unread. qgpu's own are far smaller.
MAX_MESSAGE = 16 * 1024 * 1024
_MAX_FDS = 16
_LENGTH = struct.Struct("<I")
#: Places in a listener's queue. More places make clients wait longer if somebody fills the queue.
_QUEUE = 64
_PEER = struct.Struct("iII")
_TIMEVAL = struct.Struct("@ll")
_SO_PEERPIDFD = 77  # include/uapi/asm-generic/socket.h; Python has no name for it


class WireError(Exception):
    """The peer sent something that is not a message."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The peer's credentials from the kernel (SO_PEERCRED at connect time)."""

    pid: int
    uid: int
    gid: int


@dataclass(slots=True)
class Connection:
    """One end of a connection; both ends are equal."""

    sock: socket.socket
    _data: bytearray = field(default_factory=bytearray)
    #: Received descriptors, each with the stream position at the end of the read that received it.
    _fds: list[tuple[int, int]] = field(default_factory=list)
    #: Stream position of the start of ``_data``.
    _at: int = 0
    #: The largest message in bytes; larger ones are refused unread.
    max_message: int = MAX_MESSAGE
    #: The most descriptors received at a time; with 0, the kernel drops them.
    max_fds: int = _MAX_FDS

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self.sock.fileno()

    @property
    def unread(self) -> bool:
        """Tell whether data has arrived that no returned message contains."""
        return bool(self._data)

    @property
    def hung_up(self) -> bool:
        """Tell whether the peer has closed its end; what it had sent may still be unread."""
        poll = select.poll()
        poll.register(self.sock, 0)  # POLLHUP is always reported
        return any(events & select.POLLHUP for _, events in poll.poll(0))

    def peer(self) -> Peer:
        """Return the peer's credentials."""
        return Peer(*_PEER.unpack(self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)))

    def peer_process(self) -> int:
        """Return a pidfd of the process that connected; the caller closes it. Unlike a pid, it is never reused.

        Before Linux 6.5 it is a pidfd of the process that has the peer's pid now. Raises OSError when that has ended.
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

        Raises WireError for an invalid message, TimeoutError when the socket's timeout expires.
        """
        while (message := self.next_buffered()) is None:
            if not self.fill():
                return None
        return message

    def next_buffered(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return a message that has arrived completely, or None.

        Raises WireError for an invalid one, whose descriptors stay until the connection is closed.
        """
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
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise WireError("not JSON") from error
        if not isinstance(message, dict):
            raise WireError("not a JSON object")
        return message, self._take_fds()

    def fill(self) -> bool:
        """Read what has arrived; False at the end of the stream. Raises WireError for too many descriptors."""
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
            raise WireError("too many descriptors")
        return bool(data)

    def _take_fds(self) -> list[int]:
        """Take the descriptors of the message that ends here.

        One read may return several messages, but it stops behind a message with descriptors (unix_stream_read_generic
        in net/unix/af_unix.c). So the descriptors belong to the last message that started in that read.
        """
        mine = [fd for end, fd in self._fds if end <= self._at]
        self._fds = [(end, fd) for end, fd in self._fds if end > self._at]
        return mine

    def close(self) -> None:
        """Close the socket and all descriptors not taken. Use it only between qgpu's own processes."""
        fds, self._fds = self._fds, []
        for _, fd in fds:
            os.close(fd)
        self.sock.close()

    def detach(self) -> list[int]:
        """Disconnect; return the socket and all descriptors not taken, of any kind, for the caller to close."""
        fds, self._fds = self._fds, []
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        mine = self.sock.detach()
        return [*(fd for _, fd in fds), *([mine] if mine >= 0 else [])]


def connect(path: str, timeout_s: float | None = None) -> Connection:
    """Connect to a listening socket; with a timeout of 0, without waiting for a place in its queue. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if timeout_s:
            _connect(sock, path, time.monotonic() + timeout_s)
            sock.settimeout(timeout_s)
        else:
            sock.settimeout(timeout_s)
            sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return Connection(sock)


def _connect(sock: socket.socket, path: str, deadline: float) -> None:
    """Connect a blocking socket. With Python's timeout, a full queue fails connect() at once (unix_stream_connect).

    Raises OSError.
    """
    while (left_s := deadline - time.monotonic()) > 0:
        whole_s, rest_s = divmod(left_s, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(whole_s), int(rest_s * 1e6) or 1))
        try:
            sock.connect(path)
            sock.getpeername()
        except BlockingIOError:
            break
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
            continue  # after a signal, Python returns without a connection
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(0, 0))
        return
    raise TimeoutError("timed out")


def listen(path: str, mode: int) -> socket.socket:
    """Listen at ``path`` with file ``mode``, replacing a dead socket there. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    temporary = f"{path}.{os.getpid()}"
    try:
        with suppress(FileNotFoundError):
            os.unlink(temporary)  # from a killed process that had our pid, for example in a container
        sock.bind(temporary)
        os.chmod(temporary, mode)
        sock.listen(_QUEUE)
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
