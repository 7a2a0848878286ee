"""What a service manager has kept, and the guardian that is begun with it before the daemon is loaded."""

from __future__ import annotations

import os
from contextlib import suppress
from types import SimpleNamespace

import pytest

from qgpu.errors import BackendGoneError
from qgpu.ipc import wire
from qgpu.planes.seccomp import restored_fds


class _Standby:
    def __init__(self, runtime_dir, state, listeners):
        self.given = (runtime_dir, state, dict(listeners))
        self.did = []

    def begin(self, *, killed):
        self.did.append(("begin", killed))

    def end(self):
        self.did.append("end")


def _store(**found):
    def take(prefix):
        return {name.removeprefix(prefix): fd for name, fd in found.items() if name.startswith(prefix)}

    return SimpleNamespace(take=take)


@pytest.fixture(autouse=True)
def started(monkeypatch):
    monkeypatch.setattr(restored_fds, "StandbyLink", _Standby)


def _pipes(count):
    return [fd for _ in range(count) for fd in os.pipe()]


def test_without_guardian_one_starts_with_all_restored_fds(tmp_path):
    found = restored_fds.RestoredFds(_store(**{"journal": 7, "files": 9, "listener.3.web.one": 8}), tmp_path)

    assert found.standby.given == (tmp_path, (7, 9), {3: ("web.one", 8)})
    assert found.standby.did == [("begin", True)]


def test_where_a_guardian_listens_another_waits_in_reserve(tmp_path):
    with wire.listen(str(tmp_path / "guardian.sock"), 0o600):
        found = restored_fds.RestoredFds(_store(journal=7, files=9), tmp_path)

    assert found.standby.did == []


def test_one_before_which_many_wait_is_no_dead_guardian(tmp_path):
    path = str(tmp_path / "guardian.sock")
    with wire.listen(path, 0o600):
        waiting = []
        with suppress(BlockingIOError):
            while True:
                waiting.append(wire.connect(path, 0))
        found = restored_fds.RestoredFds(_store(journal=7, files=9), tmp_path)
        for connection in waiting:
            connection.close()

    assert found.standby.did == []


def test_where_nothing_is_kept_nothing_is_started(tmp_path):
    found = restored_fds.RestoredFds(_store(), tmp_path)

    assert (found.state, found.listeners, found.standby) == (None, {}, None)


def test_where_none_can_be_started_it_is_left_to_the_plane(tmp_path, monkeypatch):
    def refuse(*_):
        raise BackendGoneError("no process to be had")

    monkeypatch.setattr(restored_fds, "StandbyLink", refuse)
    found = restored_fds.RestoredFds(_store(journal=7, files=9), tmp_path)

    assert (found.state, found.standby) == ((7, 9), None)


def test_a_plane_without_use_for_it_closes_it_all(tmp_path):
    journal, listener, files, *others = _pipes(2)
    found = restored_fds.RestoredFds(
        _store(**{"journal": journal, "files": files, "listener.3.web": listener}), tmp_path
    )
    found.close()

    assert found.standby.did[-1] == "end"
    for fd in (journal, listener, files):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    for fd in others:
        os.close(fd)
