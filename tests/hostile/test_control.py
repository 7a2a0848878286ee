"""What clients can do to the control socket: run into a defect, come in crowds, send much. The daemon goes on."""

from __future__ import annotations

import threading
import time

import pytest

from qgpu import control
from qgpu.control import Client, Server
from qgpu.errors import DaemonUnreachableError, QgpuError
from qgpu.places import socket_path
from qgpu.systemd import Store


def test_a_defect_is_its_clients_to_hear_and_nobody_elses(tmp_path):
    def handle(session, message, fds):
        if message["op"] == "bad":
            raise KeyError("gone")
        return {"value": 1}

    server = Server(tmp_path, 0o600, None, handle, Store())
    try:
        with Client(tmp_path) as client:
            with pytest.raises(QgpuError, match="KeyError"):
                client.call("bad")
            assert client.call("good")["value"] == 1
    finally:
        server.close()


def answering(session, message, fds):
    return {"value": len(message.get("text", ""))}


@pytest.fixture
def guests(tmp_path, monkeypatch):
    """A server that takes everybody for one that may only look, but for whom ``allowed`` is set."""
    allowed = threading.Event()
    monkeypatch.setattr(Server, "_may_change", lambda self, connection: allowed.is_set())
    server = Server(tmp_path, 0o600, None, answering, Store())
    yield allowed
    server.close()


def test_who_may_only_look_takes_no_place_from_who_may_change_things(guests, tmp_path, monkeypatch):
    monkeypatch.setattr(control, "MAX_GUESTS", 3)
    crowd = [Client(tmp_path) for _ in range(3)]
    assert [client.call("look")["value"] for client in crowd] == [0, 0, 0]
    with pytest.raises(QgpuError, match=r"too many clients|hung up|connection lost"), Client(tmp_path) as one_more:
        one_more.call("look")
    guests.set()
    with Client(tmp_path) as root:
        assert root.call("look")["value"] == 0
    guests.clear()
    for client in crowd:
        client.close()
    until_heard(tmp_path)


def until_heard(runtime_dir):
    """Ask until there is an answer; the test's timeout is the bound."""
    while True:
        try:
            with Client(runtime_dir) as client:
                return client.call("look")
        except QgpuError:
            time.sleep(0.01)


def test_when_no_thread_can_be_had_the_next_client_is_heard_all_the_same(guests, tmp_path, monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(QgpuError), Client(tmp_path) as client:
            client.call("look")
    until_heard(tmp_path)


def test_who_may_only_look_sends_little_at_once(guests, tmp_path):
    with pytest.raises(DaemonUnreachableError), Client(tmp_path) as client:
        client.call("look", text="x" * (1 << 17))
    guests.set()
    with Client(tmp_path) as client:
        assert client.call("look", text="x" * (1 << 17))["value"] == 1 << 17
    assert socket_path(tmp_path).exists()
