"""A small HTTP server for qgpu's pages and metrics: few requests, short answers, a bounded number of connections.

It decides which clients are accepted (addresses, Host headers, how many at once); its caller decides on the answers.
Python's own server handles the protocol. One connection is one request.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import stat
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog

from qgpu.errors import ConfigError, InvalidValueError
from qgpu.ipc import wire

_log = structlog.get_logger("http")

#: How long a client may be silent in the middle of a request.
_SILENCE_S = 5.0
#: How long to pause when no descriptor is free for another client.
_NO_FD_PAUSE_S = 0.1
#: The least interval between accepted clients, because each takes time from the rest of this process.
_PAUSE_S = 0.005
#: Our requests have a body of at most one line.
_MAX_BODY, _MOST_DIGITS = 4096, 4
_LAST_PORT = 65535
#: What a Host header names: a name or an address, and perhaps a port (RFC 9110, section 7.2).
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~-]*)(?::([0-9]{0,5}))?")
_MALFORMED = b"this is not a request: its first line, its address or a header is malformed\n"


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen: a TCP address, or a path for a unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def private(self) -> bool:
        """Tell whether only this host can reach it."""
        return bool(self.path) or ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read ``127.0.0.1:9835``, ``[::1]:9835``, ``localhost:9835`` or ``unix:/path``. Raises InvalidValueError."""
    if text.startswith("unix:/"):
        return Address(path=text.removeprefix("unix:"))
    host, _, port = text.rpartition(":")
    if host == "localhost":
        host = "127.0.0.1"
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        if not port.isdecimal() or int(port) > _LAST_PORT:
            raise ValueError(port)
    except ValueError:
        raise InvalidValueError(
            f"{text!r}: write an IP address or localhost, and a port, as in 127.0.0.1:9835"
        ) from None
    return Address(str(address), int(port))


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for. Header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    """The answer; an iterator as the body is sent piece by piece until either side stops."""

    body: bytes | Iterator[bytes] = b""
    kind: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class HttpServer:
    """Listens at one address and answers each request in a thread of its own."""

    def __init__(self, address: Address, answer: Callable[[Request], Response], max_clients: int) -> None:
        try:
            self._server = _Server(address, answer, max_clients)
        except OSError as error:
            raise ConfigError(
                f"{address}: cannot listen there: {error.strerror or error}; choose another address"
            ) from error
        self.address = self._server.address
        self._thread = threading.Thread(target=self._server.serve_forever, name=f"http {address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more requests, and disconnect all clients."""
        self._server.shutdown()
        self._thread.join()
        self._server.end()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: Address, answer: Callable[[Request], Response], max_clients: int) -> None:
        self.answer = answer
        self._max_clients = max_clients
        #: Connected clients, oldest first, and whether their request has arrived completely.
        self._clients: OrderedDict[socket.socket, bool] = OrderedDict()
        self._lock = threading.Lock()
        if ":" in address.host:
            self.address_family = socket.AF_INET6
        super().__init__((address.host, address.port), _Handler, bind_and_activate=False)
        if address.path:
            self.socket.close()
            _check_free(address.path)
            self.socket = wire.listen(address.path, 0o600)
            self.address = address
        else:
            try:
                self.server_bind()
                self.server_activate()
            except OSError:
                self.server_close()
                raise
            self.address = Address(address.host, self.socket.getsockname()[1])

    def server_bind(self) -> None:
        """Bind without asking the resolver for a name, as the base class does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve one more client; if there are too many, disconnect one.

        That is the oldest client without a complete request, or else the oldest client. So silent clients block no
        places.
        """
        leaving = None
        with self._lock:
            if len(self._clients) >= self._max_clients:
                leaving = next((client for client, heard in self._clients.items() if not heard), None)
                leaving = leaving or next(iter(self._clients))
                del self._clients[leaving]
            self._clients[request] = False
        if leaving is not None:
            with suppress(OSError):
                leaving.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def heard(self, request: Any) -> None:
        """Record that a client's request has arrived completely."""
        with self._lock:
            if request in self._clients:
                self._clients[request] = True

    def shutdown_request(self, request: Any) -> None:
        """Forget a client that has been served."""
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a client; without a free descriptor, pause before the next attempt."""
        time.sleep(_PAUSE_S)
        try:
            return super().get_request()
        except OSError:
            time.sleep(_NO_FD_PAUSE_S)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's arguments
        """Log defects, but not clients that hung up."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("request failed", address=str(self.address))

    def end(self) -> None:
        """Disconnect all clients and close."""
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        if self.address.path:
            Path(self.address.path).unlink(missing_ok=True)
        self.server_close()

    def knows(self, name: str) -> bool:
        """Tell whether a Host header's name is ours: another site's page may resolve its own name to this address.

        A server that listens for other hosts is reached by any name; it serves only public data.
        """
        if not self.address.private:
            return True
        return name in ("localhost", self.address.host) or bool(self.address.path)


def _check_free(path: str) -> None:
    """Raise OSError if a file is at a path for a socket, or another program listens there: it would be replaced."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise FileExistsError(errno.EEXIST, "a file that is no socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if probe.connect_ex(path) != errno.ECONNREFUSED:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    raw_requestline: bytes
    timeout = _SILENCE_S
    server_version = "qgpu"
    #: The version of requests that name none, and of the answers: the base class's answers to HTTP/0.9 have no status.
    default_request_version = "HTTP/1.0"
    sys_version = ""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Keep no log of requests."""

    def do_GET(self) -> None:
        """Answer the request."""
        self._send(self._response())

    do_HEAD = do_POST = do_GET  # noqa: N815 - likewise

    def parse_request(self) -> bool:
        """Parse a request. If that fails, answer it with an error here, and return False."""
        if not super().parse_request():
            if not self.raw_requestline.strip():  # for this request, the base class sends no answer
                self.send_error(HTTPStatus.BAD_REQUEST)
            return False
        if len(self.requestline.split()) < 3:  # HTTP/0.9, whose answers have no status
            self.send_error(HTTPStatus.BAD_REQUEST)
            return False
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Answer for the base class, which would repeat the request in a page of HTML."""
        said = _MALFORMED if code == HTTPStatus.BAD_REQUEST else f"{HTTPStatus(code).phrase.lower()}\n".encode()
        self._send(Response(said, status=code))

    def _response(self) -> Response:
        try:
            headers, path = _headers(self.headers), urlsplit(self.path).path
            name = _host_name(headers.get("host", ""))
            length = _length(headers.get("content-length", "0"))
        except ValueError:
            return Response(_MALFORMED, status=400)
        if not self.server.knows(name):
            return Response(b"this is not the host you asked for\n", status=421)
        if length > _MAX_BODY or "transfer-encoding" in headers:
            return Response(b"too long\n", status=413)
        body = self.rfile.read(length)
        self.server.heard(self.request)
        method = "GET" if self.command == "HEAD" else self.command  # the same answer without its body
        return self.server.answer(Request(method, path, headers, body))

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.kind)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        for name, value in response.headers.items():
            self.send_header(name, value)
        if isinstance(response.body, bytes):
            self.send_header("Content-Length", str(len(response.body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        for piece in [response.body] if isinstance(response.body, bytes) else response.body:
            self.wfile.write(piece)
            self.wfile.flush()


def _headers(said: Message) -> dict[str, str]:
    """Return the headers by their names in lower case. Raises ValueError if one is malformed."""
    headers = {name.lower(): value for name, value in said.items()}
    twice = any(len(said.get_all(name, ())) > 1 for name in ("host", "content-length"))
    if said.defects or said.get_unixfrom() or twice or any("\n" in value for value in headers.values()):
        raise ValueError("headers")
    return headers


def _host_name(host: str) -> str:
    """Return the name or address in a Host header, in lower case. Raises ValueError if it is malformed."""
    match = _HOST.fullmatch(host.strip())
    if match is None or int(match[2] or 0) > _LAST_PORT:
        raise ValueError(host)
    return match[1].strip("[]").lower()


def _length(text: str) -> int:
    """Return a Content-Length. Raises ValueError if it is no number."""
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(text)
    return int(text) if len(text) <= _MOST_DIGITS else _MAX_BODY + 1
