"""Who connects is heard, whatever became of those before."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from qgpu.errors import InvalidValueError
from qgpu.ipc import wire
from qgpu.ipc.listener import SocketListener
from qgpu.ipc.systemd import FdStore


def test_client_that_breaks_handler_is_dropped_and_next_served(tmp_path: Path) -> None:
    def take(sock: socket.socket) -> None:
        with sock:
            sock.sendall(bytes([10 // sock.recv(1)[0]]))

    path = tmp_path / "socket"
    door = SocketListener("test", path, 0o600, FdStore(), take)
    try:
        answers = []
        for asked in (0, 5):
            with wire.connect(str(path), 5).sock as client:
                client.sendall(bytes([asked]))
                answers.append(client.recv(1))
    finally:
        door.close()

    assert answers == [b"", b"\x02"]
    assert not path.exists()


@pytest.mark.parametrize("place", ["nowhere/socket", "x" * 200])
def test_where_nobody_could_connect_is_said(tmp_path: Path, place: str) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(InvalidValueError, match=r"(No such file|too long).*; no client could connect there"):
        SocketListener("test", tmp_path / place, 0o600, FdStore(), lambda _: None)

    assert len(os.listdir("/proc/self/fd")) == len(before)
