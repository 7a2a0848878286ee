"""When the daemon ends a guardian that answers."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from qgpu.planes.seccomp import host
from qgpu.planes.seccomp.host import SeccompHost


@pytest.mark.parametrize(
    ("stuck", "lives", "age_s", "waits", "ended"),
    [
        (host._MOST_STUCK, True, host._SETTLED_S, True, True),
        (host._MOST_STUCK - 1, True, host._SETTLED_S, True, False),
        (host._MOST_STUCK, None, 0, True, False),
        (host._MOST_STUCK, False, host._SETTLED_S, True, False),
        (host._MOST_STUCK, True, 0, True, False),
        (host._MOST_STUCK, True, host._SETTLED_S, False, False),
    ],
    ids=["many stuck", "few stuck", "no standby", "dead standby", "new standby", "SIGKILL frees nothing"],
)
def test_guardian_full_of_stuck_calls_ends_only_for_a_standby(monkeypatch, stuck, lives, age_s, waits, ended):
    killed = []
    plane = SeccompHost.__new__(SeccompHost)
    plane._lock = threading.RLock()
    plane._link = SimpleNamespace(hello={"pid": 1}, pidfd=9)
    plane._standby = None if lives is None else SimpleNamespace(lives=lives, began_s=time.monotonic() - age_s)
    monkeypatch.setattr(plane, "_call", lambda op: {"pods": [], "stuck": stuck})
    monkeypatch.setattr(host, "waits_for_pages", lambda pid: waits)
    monkeypatch.setattr(host, "_kill", killed.append)

    assert (plane.pods(), killed) == ([], [9] * ended)


def test_names_of_retired_pods_are_those_that_it_tells(monkeypatch):
    plane = SeccompHost.__new__(SeccompHost)
    monkeypatch.setattr(plane, "_call", lambda op: {"pods": [], "left": {}, "names_in_use": ["a"]})

    assert plane.names_in_use() == ["a"]
