"""The HTTP server of the page and the metrics, as strangers on the network talk to it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from qgpu.errors import ConfigError, DaemonUnreachableError
from qgpu.ipc import wire
from qgpu.ipc.control_socket import Client
from qgpu.ipc.http_server import Address, HttpServer, Request, Response, parse_address
from qgpu.metrics import exporter
from qgpu.metrics.view import View
from qgpu.web.site import Site


def answer(request: Request) -> Response:
    """Answer with the path; endlessly at /endless."""
    body = iter(lambda: b"x", b"") if request.path == "/endless" else f"{request.method} {request.path}".encode()
    return Response(body)


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    running = HttpServer(Address("127.0.0.1", 0), answer, 8)
    yield running
    running.close()


def asked(server: HttpServer, request: bytes) -> bytes:
    return sent((server.address.host, server.address.port), request)


def sent(address: tuple[str, int], request: bytes) -> bytes:
    """Send bytes, and return the whole answer."""
    with socket.create_connection(address, 10) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.fixture(scope="module", params=["page", "metrics", "metrics for other hosts"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of each server that qgpu has."""

    def connect() -> Client:
        raise DaemonUnreachableError("there is none")

    if request.param == "page":
        with closing(Site(Address("127.0.0.1", 0), connect, changes=True)) as site:
            yield site.address.port
        return
    host = "127.0.0.1" if request.param == "metrics" else "0.0.0.0"
    with closing(exporter.serve(Address(host, 0), View, with_hami=False)) as metrics:
        yield metrics.address.port


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET http://[ HTTP/1.0\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\x13\x01\r\n\r\n", 400),
        (b"GET / HTTP/one\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
        (b"HELLO / HTTP/1.0\r\n\r\n", 501),
        (b"GET /%s HTTP/1.0\r\n\r\n" % (b"x" * 70000), 414),
        (b"GET / HTTP/1.0\r\nX: %s\r\n\r\n" % (b"x" * 70000), 431),
        *(
            (b"GET / HTTP/1.0\r\nHost: localhost\r\n%s\r\n\r\n" % line, 400)
            for line in (
                b"Content-Length: abc",
                b"Content-Length: -5",
                b"Content-Length: ",
                b"Content-Length: \xb2",
                b"Content-Length: 1\r\nContent-Length: 2",
                b"no colon",
                b"Accept : a space before the colon",
                b": no name",
                b"Accept: folded\r\n over lines",
                b"Host: another",
            )
        ),
        *(
            (b"GET / HTTP/1.0\r\nHost: %s\r\n\r\n" % host, 400)
            for host in (
                b"[::1",
                b"localhost:\xff",
                b"localhost:99999999",
                b"localhost:65536",
                b"a/b",
                b"user@localhost",
            )
        ),
        (b"GET / HTTP/1.0\r\n folded: first\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nFrom a mailbox\r\nHost: localhost\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nHost: localhost\r\nContent-Length: 99999\r\n\r\n", 413),
    ],
)
def test_a_request_that_cannot_be_parsed_gets_a_status(port: int, request_: bytes, status: int) -> None:
    with structlog.testing.capture_logs() as logged:
        head, _, body = sent(("127.0.0.1", port), request_).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.0 %d " % status), head
    assert b"Content-Type: text/plain" in head
    assert body.count(b"\n") == 1
    assert logged == []


@pytest.mark.parametrize("host", [b"localhost", b"LOCALHOST:9836", b"127.0.0.1", b"localhost:"])
def test_a_host_header_may_have_a_port(port: int, host: bytes) -> None:
    said = sent(("127.0.0.1", port), b"GET /none HTTP/1.1\r\nHost: %s\r\n\r\n" % host)

    assert said.startswith(b"HTTP/1.0 404 ")


@pytest.mark.parametrize("path", ["/metrics", "/endless"])
def test_head_gets_the_head_and_no_body(server: HttpServer, path: str) -> None:
    said = asked(server, f"HEAD {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())

    assert said.startswith(b"HTTP/1.0 200 ")
    assert said.endswith(b"\r\n\r\n")


@given(
    target=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20),
    host=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20),
    method=st.sampled_from(["GET", "HEAD", "POST"]),
)
def test_no_request_line_or_host_is_a_defect(server: HttpServer, target: str, host: str, method: str) -> None:
    with structlog.testing.capture_logs() as logged:
        said = asked(server, f"{method} {target} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode()) if target else b""
    assert logged == []
    assert said[:9] in (b"HTTP/1.0 ", b"")


def test_a_file_in_a_sockets_place_stays(tmp_path: Path) -> None:
    """An operator's wrong path would remove any file of the host."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"unix:.*file: cannot listen there: a file that is no socket is there"):
        HttpServer(Address(path=str(tmp_path / "file")), answer, 8)

    assert (tmp_path / "file").read_text() == "mine"


def test_another_programs_socket_stays_until_that_has_ended(tmp_path: Path) -> None:
    address = Address(path=str(tmp_path / "socket"))
    other = wire.listen(address.path, 0o600)
    with pytest.raises(ConfigError, match="Address already in use"):
        HttpServer(address, answer, 8)
    other.close()

    HttpServer(address, answer, 8).close()
    assert not Path(address.path).exists()


def test_localhost_is_a_loopback_address() -> None:
    assert parse_address("localhost:9836") == Address("127.0.0.1", 9836)
