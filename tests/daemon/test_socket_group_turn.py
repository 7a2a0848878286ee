"""Requests of members of the socket's group are answered one at a time; root's wait for none that waits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace, TracebackType

import pytest
import structlog

from qgpu.config import Config
from qgpu.daemon import socket_group_turn
from qgpu.daemon.control_requests import ControlRequests
from qgpu.daemon.plane_choice import PlaneChoice
from qgpu.daemon.settings_file import SettingsFile
from qgpu.daemon.socket_group_turn import SocketGroupTurn
from qgpu.ipc import wire
from qgpu.ipc.control_socket import Session
from qgpu.linux import log_rate_limit
from qgpu.model import Grant
from qgpu.model.plane_names import Plane
from qgpu.planes.sim.host import Clock, SimHost


def client(uid: int, *, may_change: bool = True) -> Session:
    return Session(wire.Peer(os.getpid(), uid, uid), may_change=may_change, process=os.pidfd_open(os.getpid()))


OTHER, FOREIGN = os.geteuid() + 1234, os.geteuid() + 1235


class Crowd:
    """Counts the threads that are within a block at a time, at most."""

    def __init__(self, lock: threading.RLock | None = None) -> None:
        self._lock, self._count, self._guard, self.most = lock, 0, threading.Lock(), 0

    def __enter__(self) -> None:
        with self._guard:
            self._count += 1
            self.most = max(self.most, self._count)
        if self._lock is not None:
            self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._lock is not None:
            self._lock.release()
        with self._guard:
            self._count -= 1


@contextmanager
def requests() -> Iterator[tuple[ControlRequests, SimHost]]:
    host = SimHost(1, Clock.REAL)
    made = ControlRequests(host, PlaneChoice(Plane.SIM, "test"), Config(), SettingsFile(None))
    try:
        yield made, host
    finally:
        made.close()


def test_one_member_at_most_waits_for_the_pods_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_group_turn, "PACE_S", 0.0)
    with requests() as (made, host):
        host.admit("one", {0: Grant()})
        monkeypatch.setattr(made.pods, "runs", lambda pod: True)
        crowd = Crowd(made.pods.lock)
        monkeypatch.setattr(made, "_lock", crowd)
        sessions = [client(OTHER) for _ in range(8)]

        def work(session: Session) -> None:
            for _ in range(10):
                made.handle(session, {"op": "pod.set", "name": "one", "cores": None}, [])

        with ThreadPoolExecutor(len(sessions)) as threads:
            with made.pods.lock:
                started = [threads.submit(work, session) for session in sessions]
                while not crowd.most:
                    time.sleep(0.001)
            for each in started:
                each.result()

    assert crowd.most == 1


@pytest.mark.parametrize("op", ["pod.list", "gpu.list", "status", "events"])
def test_members_look_one_at_a_time(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    with requests() as (made, _):
        crowd = Crowd()

        def slow(*_: object) -> dict[str, object]:
            with crowd:
                time.sleep(0.005)
            return {}

        monkeypatch.setitem(made._reading if op in made._reading else made._looking, op, slow)
        sessions = [client(OTHER) for _ in range(8)]
        with ThreadPoolExecutor(len(sessions)) as threads:
            list(threads.map(lambda session: made.handle(session, {"op": op}, []), sessions))

    assert crowd.most == 1


@pytest.mark.parametrize("session", [client(0), client(os.geteuid()), client(OTHER, may_change=False)])
def test_others_than_members_wait_for_no_turn(session: Session) -> None:
    turn = SocketGroupTurn()
    with turn(client(OTHER)), turn(session):  # it would wait for ever
        pass


def test_user_with_many_requests_delays_another_by_one() -> None:
    turn, order = SocketGroupTurn(), list[int]()
    first = threading.Event()

    def ask(uid: int) -> None:
        with turn(client(uid)):
            order.append(uid)
            first.set()
            time.sleep(0.02)

    with ThreadPoolExecutor(21) as threads:
        for _ in range(20):
            threads.submit(ask, OTHER)
        first.wait()
        threads.submit(ask, FOREIGN)

    assert order.index(FOREIGN) < 15


def test_burst_of_members_changes_has_a_line_in_the_log_each() -> None:
    """One line would be hidden among more than the log takes of a kind per second."""
    lines, kept = log_rate_limit.LogRateLimit(), list[int]()

    def say(number: int) -> dict[str, object]:
        with suppress(structlog.DropEvent):
            lines(None, "info", {"event": "pod set"})
            kept.append(number)
        return {}

    with requests() as (made, _):
        made._changing["pod.set"] = lambda _session, arguments, _fds: say(arguments.need("number", int))
        for number in range(25):
            made.handle(client(OTHER), {"op": "pod.set", "number": number}, [])

    assert kept == list(range(25))


def test_next_member_waits_for_as_long_as_the_last_one_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], list[float]()
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append)
    monkeypatch.setattr(socket_group_turn, "time", clock)
    turn = SocketGroupTurn()
    for took_s in (0.25, 30.0, 0.0):
        with turn(client(OTHER)):
            now[0] += took_s

    assert slept == [0.0, 0.25, 1.0]
