"""A guardian's socket, which somebody may take away."""

from __future__ import annotations

import errno
import os
import selectors
import shutil

from qgpu import wire
from qgpu.guardian.register import Register
from qgpu.guardian.sessions import Sessions


def test_a_socket_that_was_removed_is_there_again_as_soon_as_it_can_be(tmp_path, monkeypatch):
    path, listen = tmp_path / "run" / "guardian.sock", wire.listen
    path.parent.mkdir()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with selectors.DefaultSelector() as selector:
        sessions = Sessions(path, selector, Register(), lambda op: None, lambda card: None)
        shutil.rmtree(path.parent)
        monkeypatch.setattr(wire, "listen", full)
        sessions.stay()
        sessions.stay()
        assert not path.exists()

        monkeypatch.setattr(wire, "listen", listen)
        sessions.stay()
        wire.connect(str(path), 1.0).close()
        assert selector.select(1.0)
