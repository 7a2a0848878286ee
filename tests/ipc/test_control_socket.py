"""The control socket bounds the places of each user and the size of each message."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from qgpu.errors import DaemonUnreachableError, InvalidValueError, PermissionDeniedError, QgpuError, TimedOutError
from qgpu.ipc import control_socket, subordinate_uids, wire
from qgpu.ipc.control_socket import Client, Server, Session, how_to_start
from qgpu.ipc.systemd import FdStore
from qgpu.paths import root_socket_path, socket_path

TIMEOUT_S = 30
ALICE, BOB, FIRST, COUNT = 1000, 1001, 100_000, 65_536


def answering(_session: object, message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
    return {"value": len(message.get("text", ""))}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    """Where a server of our own user listens."""
    made = Server(tmp_path, 0o600, None, answering, FdStore())
    yield tmp_path
    made.close()


@pytest.fixture
def crowd(server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowd]:
    """Clients of a small server, on a host where a user of two has thousands of user ids."""
    table = tmp_path / "subuid"
    table.write_text(f"# users\nalice:{FIRST}:{COUNT}\nbob:{FIRST + COUNT}:{COUNT}\n")
    monkeypatch.setattr(subordinate_uids, "TABLE", table)
    for name, most in (("MAX_CLIENTS", 20), ("FOR_ROOT", 4), ("MAX_GUESTS", 8), ("MAX_OF_USER", 2)):
        monkeypatch.setattr(control_socket, name, most)
    with ExitStack() as clients:
        yield Crowd(server, clients, monkeypatch)


class Crowd:
    """Connects clients of any user, who stay."""

    def __init__(self, server: Path, clients: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self._server, self._clients, self._monkeypatch = server, clients, monkeypatch

    def places(self, uid: int, *, may_change: bool) -> int:
        """Take all places that a user gets; how many."""
        self._monkeypatch.setattr(Server, "_may_change", lambda _server, _connection: may_change)
        self._monkeypatch.setattr(wire.Connection, "peer", lambda _connection: wire.Peer(os.getpid(), uid, 0))
        taken = 0
        try:
            while True:
                self._clients.enter_context(Client(self._server)).call("look")
                taken += 1
        except QgpuError:
            return taken


@pytest.mark.parametrize("may_change", [True, False], ids=["members", "guests"])
def test_ids_of_one_user_leave_places_to_other_users(crowd: Crowd, may_change: bool) -> None:
    mine = [crowd.places(uid, may_change=may_change) for uid in (ALICE, *range(FIRST, FIRST + 5), FIRST + COUNT - 1)]

    assert mine == ([8, 4, 0, 0, 0, 0, 0] if may_change else [2, 2, 0, 0, 0, 0, 0])
    assert crowd.places(BOB, may_change=may_change) == 2
    assert crowd.places(FIRST + COUNT, may_change=may_change)
    assert crowd.places(0, may_change=True) >= 4


def test_a_changed_table_of_ids_counts_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subordinate_uids, "TABLE", table := tmp_path / "subuid")
    seen = [subordinate_uids.owner(FIRST)]
    for text in (f"alice:{FIRST}:1\n", f"alice:{FIRST + 1}:9\n1000:{FIRST}:1\n", f"alice:x:1\nalice:{FIRST}\n"):
        table.write_text(text)
        seen.append(subordinate_uids.owner(FIRST))

    assert seen == [str(FIRST), "alice", "1000", str(FIRST)]


def test_root_sends_as_much_as_a_container_may_need(server: Path) -> None:
    with Client(server) as client:
        assert client.call("look", text="x" * (2 << 20))["value"] == 2 << 20
    with pytest.raises(DaemonUnreachableError), Client(server) as client:
        client.call("look", text="x" * (4 << 20))


@pytest.mark.parametrize("uid", [ALICE, 0], ids=["member", "root"])
def test_message_sent_byte_by_byte_is_read_in_few_reads(
    server: Path, monkeypatch: pytest.MonkeyPatch, uid: int
) -> None:
    """Each read takes time from the scheduling loops; root may take it."""
    reads, fill = 0, wire.Connection.fill

    def counted(connection: wire.Connection) -> bool:
        nonlocal reads
        reads += 1
        return fill(connection)

    monkeypatch.setattr(Server, "_may_change", lambda _server, _connection: True)
    monkeypatch.setattr(wire.Connection, "peer", lambda _connection: wire.Peer(os.getpid(), uid, 0))
    body = b'{"op": "look", "text": "' + b"x" * 200 + b'"}'
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(socket_path(server)))
        monkeypatch.setattr(wire.Connection, "fill", counted)
        for byte in struct.pack("<I", len(body)) + body:
            sock.send(bytes([byte]))
            time.sleep(0.001)
        read, connection = reads, wire.Connection(sock)
        received = None
        while received is None:
            assert fill(connection)
            received = connection.next_buffered()

    assert received[0]["value"] == 200
    assert (read < 20) == bool(uid)


def test_a_client_whose_end_fails_leaves_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _failure: None)
    ended = []

    def fail() -> None:
        raise ValueError

    def answer(session: Session, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        session.at_end += [lambda: ended.append("first"), fail, lambda: ended.append("last")]
        return answering(session, message, fds)

    server = Server(tmp_path, 0o600, None, answer, FdStore())
    with Client(tmp_path) as client:
        client.call("look")
    deadline = time.monotonic() + TIMEOUT_S
    while server._limits._taken and time.monotonic() < deadline:
        time.sleep(0.01)
    server.close()

    assert (sorted(ended), server._limits._taken) == (["first", "last"], {})


@pytest.mark.root
def test_request_of_a_client_that_has_left_is_not_made(tmp_path: Path) -> None:
    """Its user was told that the daemon had not answered in time."""
    accepting, made = threading.Event(), list[str]()

    def handle(_session: object, message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        made.append(message["op"])
        return {}

    def pod_of(_session: object) -> str:
        accepting.wait(TIMEOUT_S)
        return ""

    server = Server(tmp_path, 0o600, None, handle, FdStore(), pod_of)
    try:
        with Client(tmp_path, 0.1) as client, pytest.raises(TimedOutError):
            client.call("gpu.set")
        accepting.set()
        with Client(tmp_path) as client:  # it is accepted after the first
            client.call("status")
    finally:
        server.close()

    assert made == ["status"]


def test_root_does_not_wait_in_the_queue_of_all(server: Path) -> None:
    """Any user can fill that one, by thousands of connections that it closes again."""
    path = socket_path(server)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as full, ExitStack() as waiting:
        full.bind(str(path))
        full.listen(0)
        waiting.enter_context(wire.connect(str(path)).sock)

        assert Client(server, 5).call("look")["value"] == 0
    assert root_socket_path(server).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("chosen", "directory", "start"),
    [
        ("", "/run/qgpu", "systemctl start qgpud"),
        ("/a", "/run/qgpu", "systemctl start qgpud"),
        ("/a", "/a", "qgpud --runtime-dir /a"),
        ("", "/a", "qgpud --runtime-dir /a"),
    ],
)
def test_a_missing_daemon_is_started_where_it_belongs(
    chosen: str, directory: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QGPU_RUNTIME_DIR", raising=False)
    if chosen:
        monkeypatch.setenv("QGPU_RUNTIME_DIR", chosen)

    assert how_to_start(Path(directory)) == f"start it: {start}"


@pytest.mark.parametrize("name", ["file", "x" * 200], ids=["file", "long"])
def test_no_daemon_is_started_where_none_can_listen(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValueError, match=r"; choose another --runtime-dir"):
        Client(tmp_path / name, 0.1)


def test_users_without_a_daemon_start_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QGPU_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: ALICE)
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"/run/user/{ALICE}")

    assert how_to_start(Path(f"/run/user/{ALICE}/qgpu")) == "start it: systemctl start qgpud"


@pytest.mark.root
@pytest.mark.parametrize(("mode", "remedy"), [(0o600, "use sudo"), (0o660, f"use sudo, or join group {ALICE}")])
def test_a_closed_socket_names_the_group_that_may_connect(
    server: Path, mode: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    os.chown(socket_path(server), -1, ALICE)
    socket_path(server).chmod(mode)
    monkeypatch.setattr(control_socket.grp, "getgrgid", {}.__getitem__)  # a host that has no name for it
    monkeypatch.setattr(wire, "connect", refuse)
    with pytest.raises(PermissionDeniedError, match=f"qgpud.sock: permission denied; {remedy}$"):
        Client(server)


def test_a_client_takes_no_other_users_daemon_for_its_own(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In /tmp every user may make the directory first, and would get the seccomp listener of a pod."""
    monkeypatch.setattr(control_socket, "shared_runtime_dir", lambda: server)
    with Client(server) as client:
        assert client.call("look")["ok"]
    monkeypatch.setattr(wire.Connection, "peer", lambda _: wire.Peer(1, os.geteuid() + 1, 0))
    with pytest.raises(PermissionDeniedError, match="another user listens there"):
        Client(server)
