"""Nothing is kept of pods that were, however many come and go."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import deque
from typing import Any

from qgpu.config import Config, GpuSettings
from qgpu.daemon.control_requests import ControlRequests
from qgpu.daemon.plane_choice import PlaneChoice
from qgpu.daemon.settings_file import SettingsFile
from qgpu.ipc import wire
from qgpu.ipc.control_socket import Session
from qgpu.model.plane_names import Plane
from qgpu.planes.sim.host import Clock, SimHost

FLOOD = {"kernel_us": 1000, "batch": 0}


def visit(requests: ControlRequests, name: str, **grant: Any) -> None:
    """Let a pod come, do some work on two cards, and go."""
    client = Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=None)
    requests.handle(client, {"op": "pod.create", "name": name, "grants": {"0": grant, "1": grant}}, [])
    for gpu in (0, 1):
        requests.handle(client, {"op": "sim.start", "pod": name, "gpu": gpu, "workload": FLOOD}, [])
    requests.handle(client, {"op": "pod.list"}, [])
    requests.counters.view()
    time.sleep(0.03)  # for loops and metrics to see it
    for call in client.at_end:
        call()


def remembered(name: str) -> list[object]:
    """Find what holds a name, or is called by it; plans that are remembered are bounded and no leak.

    No other thread runs meanwhile: CPython fails to finish a tuple that somebody else holds.
    """
    found: list[object] = []
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        _search(name, found)
    finally:
        sys.setswitchinterval(interval_s)
    return found


def _search(name: str, found: list[object]) -> None:
    for each in gc.get_objects():
        if isinstance(each, dict):
            event = {"at", "what", "by"} <= each.keys()  # the record of changes is to keep names, and is bounded
            found += [each] if _names(name, (*each, *each.values())) and not event else []
        elif isinstance(each, (set, frozenset, list, deque)):
            found += [each] if _names(name, tuple(each)) else []


def _names(name: str, members: tuple[object, ...]) -> bool:
    """Tell whether a name is among these; an array, left by another test, is not to be compared with."""
    return any(isinstance(member, str) and member == name for member in members)


def test_nothing_is_kept_of_pods_that_were() -> None:
    settings = GpuSettings(policy="fixed-share", online_policy="burst-share")
    requests = ControlRequests(
        SimHost(2, Clock.REAL), PlaneChoice(Plane.SIM, "test"), Config(defaults=settings), SettingsFile(None)
    )
    try:
        visit(requests, "first-visitor", cores=30)
        for number in range(5):
            visit(requests, f"pod-{number}", cores=10, **({"class": "online"} if number % 2 else {}))
        requests.reap()
        visit(requests, "last", cores=5)
        requests.reap()
        deadline = time.monotonic() + 30
        while (left := len(remembered("first-visitor"))) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.1)
    finally:
        requests.close()

    assert left == 0
