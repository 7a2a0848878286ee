"""A guardian's socket, which somebody may take away."""

from __future__ import annotations

import errno
import os
import selectors
import shutil

import pytest

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


CHANGED = {"event": "changed"}
#: More events than the socket of a session that does not read takes.
MANY = 600


def gone(listener):
    return {"event": "listener-gone", "listener": listener}


class Daemon:
    """A daemon that watches a kind of events, and what serves it."""

    def __init__(self, path, watch):
        def find(name):
            return self.answer

        self.watch = watch
        self.selector = selectors.DefaultSelector()
        self.sessions = DaemonSessions(path, self.selector, ObjectTable(), find, lambda card: None)
        self.connection = wire.connect(str(path), 5.0)
        self.serve()
        self.ask()

    def answer(self, session, message, fds):
        session.watching = self.watch
        return {}, []

    def serve(self):
        for key, _ in self.selector.select(5.0):
            key.data()

    def ask(self):
        """Return the events that come before the answer."""
        self.connection.send({"op": "any"})
        self.serve()
        events = []
        while "event" in (message := self.connection.receive()[0]):
            events.append(message)
        return events


@pytest.fixture
def daemon(tmp_path, request):
    made = Daemon(tmp_path / "guardian.sock", request.param)
    yield made
    made.connection.close()
    for number in list(made.sessions._sessions):
        made.sessions._hang_up(number)
    made.sessions._listening.close()
    made.selector.close()


@pytest.mark.parametrize(
    ("daemon", "expected"),
    [("changed", [CHANGED]), ("listener-gone", [gone(1)]), ("", [])],
    indirect=["daemon"],
)
def test_a_session_gets_the_kind_of_events_it_watches(daemon, expected):
    daemon.sessions.broadcast(CHANGED)
    daemon.sessions.broadcast(gone(1))

    assert daemon.ask() == expected


@pytest.mark.parametrize("daemon", ["listener-gone"], indirect=True)
def test_events_that_are_not_read_are_owed_and_none_is_lost(daemon):
    for listener in range(MANY):
        daemon.sessions.broadcast(gone(listener))
    first, events = daemon.ask(), []
    while more := daemon.ask():
        events += more

    assert first + events == [gone(listener) for listener in range(MANY)]
    assert 0 < len(first) < MANY


@pytest.mark.parametrize("daemon", ["changed"], indirect=True)
def test_change_that_nobody_reads_is_owed_once(daemon):
    for _ in range(MANY):
        daemon.sessions.broadcast(CHANGED)

    assert 0 < len(daemon.ask()) < MANY
    assert daemon.ask() == [CHANGED]
    assert daemon.ask() == []


@pytest.mark.parametrize("daemon", ["listener-gone"], indirect=True)
def test_session_that_is_owed_too_many_events_ends(daemon):
    for listener in range(4 * MANY):
        daemon.sessions.broadcast(gone(listener))

    assert len(daemon.sessions) == 0
