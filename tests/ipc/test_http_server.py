"""The HTTP server of the page and the metrics, as strangers on the network talk to it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from qgpu.ipc.http_server import Address, HttpServer, Request, Response, parse_address


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
    """Send bytes, and return the whole answer."""
    with socket.create_connection((server.address.host, server.address.port), 10) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize("request_", [b"GET http://[ HTTP/1.0\r\n\r\n", b"GET / HTTP/1.0\r\nHost: [::1\r\n\r\n"])
def test_a_request_that_cannot_be_parsed_gets_400(server: HttpServer, request_: bytes) -> None:
    with structlog.testing.capture_logs() as logged:
        assert asked(server, request_).startswith(b"HTTP/1.0 400 ")
    assert logged == []


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


def test_localhost_is_a_loopback_address() -> None:
    assert parse_address("localhost:9836") == Address("127.0.0.1", 9836)
