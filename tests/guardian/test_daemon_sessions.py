"""A guardian's socket, which somebody may take away."""

from __future__ import annotations

import errno
import os
import selectors
import shutil

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.daemon_sessions import DaemonSessions
from qgpu.ipc import wire


def test_removed_socket_is_recreated_as_soon_as_possible(tmp_path, monkeypatch):
    path, listen = tmp_path / "run" / "guardian.sock", wire.listen
    path.parent.mkdir()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with selectors.DefaultSelector() as selector:
        sessions = DaemonSessions(path, selector, ObjectTable(), lambda op: None, lambda card: None)
        shutil.rmtree(path.parent)
        monkeypatch.setattr(wire, "listen", full)
        sessions.restore_socket()
        sessions.restore_socket()
        assert not path.exists()

        monkeypatch.setattr(wire, "listen", listen)
        sessions.restore_socket()
        wire.connect(str(path), 1.0).close()
        assert selector.select(1.0)
