"""A request that runs into a defect is answered, and the daemon goes on."""

from __future__ import annotations

import pytest

from qgpu.control import Client, Server
from qgpu.errors import QgpuError
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
