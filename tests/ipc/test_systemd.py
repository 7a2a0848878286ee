"""The service manager's protocols, against a socket in its place."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qgpu.ipc.systemd import FdStore

TIMEOUT_S = 10.0
#: More messages than a socket's queue has room for (net.unix.max_dgram_qlen).
MANY = 1500


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A service manager that reads nothing by itself."""
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(path))
        made.settimeout(TIMEOUT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        yield made


def test_nobody_waits_for_a_manager_that_does_not_read(manager: socket.socket) -> None:
    store, (fd, other) = FdStore(), os.pipe()

    def keep() -> None:
        for number in range(MANY):
            store.put(f"one.{number}", fd)
            store.drop(f"one.{number}")

    keeping = threading.Thread(target=keep, daemon=True)
    keeping.start()
    keeping.join(TIMEOUT_S)
    done = not keeping.is_alive()
    said = []
    for _ in range(2 * MANY):
        message, fds, _, _ = socket.recv_fds(manager, 4096, 1)
        said.append(message.decode())
        for each in fds:
            assert os.path.sameopenfile(each, fd)
            os.close(each)
    os.close(fd)
    os.close(other)

    assert done
    names = [line for message in said for line in message.split("\n") if line.startswith("FDNAME")]
    assert names == [f"FDNAME=one.{number}" for number in range(MANY) for _ in range(2)]
    assert [message.startswith("FDSTORE=1") for message in said] == [True, False] * MANY
