"""The metrics endpoint under those who ask too often, or say nothing: it writes no faster and forgets nobody."""

from __future__ import annotations

import http.client
import socket
import threading

import pytest

from qgpu.errors import BackendGoneError
from qgpu.ipc.http_server import Address, HttpServer, Response
from qgpu.metrics import exporter
from qgpu.metrics.exporter import CachedPage


def test_scrapes_that_are_close_are_answered_by_one_writing(monkeypatch):
    monkeypatch.setattr(exporter, "_EVERY_S", 3600)
    writings = iter(range(100))
    written = CachedPage(lambda: b"%d" % next(writings))

    assert {written.latest().body for _ in range(50)} == {b"0"}


def test_scrapes_that_are_apart_are_answered_anew(monkeypatch):
    monkeypatch.setattr(exporter, "_EVERY_S", 0)
    writings = iter(range(100))
    written = CachedPage(lambda: b"%d" % next(writings))

    assert [written.latest().body for _ in range(3)] == [b"0", b"1", b"2"]


def test_a_plane_that_is_gone_is_not_asked_by_every_scrape(monkeypatch):
    monkeypatch.setattr(exporter, "_EVERY_S", 3600)
    asked = []

    def write():
        asked.append(1)
        raise BackendGoneError("gone")

    written = CachedPage(write)

    assert [written.latest().status for _ in range(5)] == [503] * 5
    assert len(asked) == 1


@pytest.fixture
def slow():
    """A server whose answer waits for the event that it is given with."""
    go, asked = threading.Event(), threading.Event()

    def answer(request):
        asked.set()
        go.wait()
        return Response(b"here")

    server = HttpServer(Address("127.0.0.1", 0), answer, 3)
    yield server.address.port, asked, go
    go.set()
    server.close()


def test_silent_clients_take_no_place_from_one_that_asks(slow):
    port, asked, go = slow
    scrape = http.client.HTTPConnection("127.0.0.1", port)
    scrape.request("GET", "/metrics")
    asked.wait()
    crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    assert crowd[0].recv(1) == b""  # made room
    go.set()

    assert scrape.getresponse().read() == b"here"
    for each in crowd:
        each.close()
