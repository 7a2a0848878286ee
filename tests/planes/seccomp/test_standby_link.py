"""The daemon's end of the one in reserve, where something is amiss."""

from __future__ import annotations

import errno
import os
import signal
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from qgpu.errors import BackendGoneError
from qgpu.guardian.failover.state_fds import StateFds
from qgpu.planes.seccomp import host, standby_link
from qgpu.planes.seccomp.host import SeccompHost
from qgpu.planes.seccomp.standby_link import StandbyLink


@pytest.fixture
def state():
    made = StateFds.new()
    yield made
    made.close()


def test_without_descriptors_no_reserve_is_started(state, tmp_path, monkeypatch):
    def none_left():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(standby_link.socket, "socketpair", none_left)

    with pytest.raises(BackendGoneError, match="Too many open files"):
        StandbyLink(tmp_path, state, {})


def test_ended_standby_is_not_killed_through_its_reused_pid(state, tmp_path, monkeypatch):
    ended = StandbyLink(tmp_path, state, {})
    ended.end()
    killed = []
    monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
    ended.drop_listener(1)

    assert (ended.lives, killed) == (False, [])


def test_standby_begins_once_and_then_ends_on_its_own(state, tmp_path):
    one = StandbyLink(tmp_path, state, {})
    told = []
    one._say = told.append
    one.begin(killed=True)
    one.begin(killed=False)
    one.end()

    assert told == [{"op": "begin", "killed": True}]
    assert one.lives
    one.kill()


@pytest.mark.parametrize(("runs", "waited_s"), [(True, 120), (False, 15)])
def test_standby_that_reads_a_long_journal_is_given_time(state, tmp_path, monkeypatch, runs, waited_s):
    one = StandbyLink(tmp_path, state, {})
    now = [one.began_s]
    monkeypatch.setattr(standby_link.proc, "cpu_s", lambda pid: now[0] if runs else 1.0)
    monkeypatch.setattr(one, "_say", lambda _: None)
    monkeypatch.setattr(standby_link, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one.begin(killed=True)
    with suppress(BackendGoneError):
        for _ in range(300):
            now[0] += 1
            one.wait_for_report(0)

    assert now[0] - one.began_s == pytest.approx(waited_s, abs=1)


@pytest.mark.parametrize("mine", [True, False])
def test_it_makes_way_for_another_guardian_and_only_for_another(state, tmp_path, mine):
    one = StandbyLink(tmp_path, state, {})
    one.begin(killed=True)
    one.kill_if_superseded(one._process.pid if mine else os.getpid())
    if mine:
        assert one.lives
        one.kill()

    assert one._process.wait(10) == -signal.SIGKILL


def test_no_guardian_begins_between_listeners_arrival_and_copy(monkeypatch):
    got = []

    def hold(*_):
        other = threading.Thread(target=lambda: got.append(plane._lock.acquire(blocking=False)))
        other.start()
        other.join()

    plane = SeccompHost.__new__(SeccompHost)
    plane._lock = threading.RLock()
    monkeypatch.setattr(host, "is_listener", lambda fd: True)
    monkeypatch.setattr(plane, "_call", lambda *_, **__: {"listener": 7})
    monkeypatch.setattr(plane, "_hold", hold)
    plane.attach("web", 1, [SimpleNamespace()])

    assert got == [False]
