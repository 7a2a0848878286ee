"""Processes on the cards that are in no pod: who is one, what is said of it, and to whom."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from qgpu.cli.status import warnings
from qgpu.config import DeviceFiles
from qgpu.daemon.device_isolation import DeviceIsolation
from qgpu.daemon.unmanaged_processes import UnmanagedProcess, UnmanagedProcesses
from qgpu.errors import NoGpuError
from qgpu.linux import cgroup, proc
from qgpu.model.plane_api import Pgpu, PodInfo
from qgpu.model.plane_names import Plane

PLACES = {10: "/qgpu/web", 11: "/qgpu/web/below", 12: "/qgpu-guardian", 13: "/user.slice/a", 14: "/qgpu/website"}
PODS = [PodInfo("web", pids=(10,), cgroup="/qgpu/web")]


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Where processes are; one that is not there has ended."""

    def of(pid: int) -> str:
        if pid not in here:
            raise FileNotFoundError(pid)
        return here[pid]

    here = dict(PLACES)
    monkeypatch.setattr(cgroup, "of", of)
    monkeypatch.setattr(proc, "name", lambda pid: f"name-{pid}")
    return here


class Cards:
    """Cards with processes on them, as the driver tells."""

    def __init__(self, *pids: int) -> None:
        self.pids: Sequence[int] | None = pids

    def __call__(self, uuid: str) -> Sequence[int]:
        if self.pids is None:
            raise NoGpuError("NVML: it does not say")
        return self.pids


def watch(cards: Cards) -> UnmanagedProcesses:
    isolation = DeviceIsolation(Plane.SIM, DeviceFiles.AUTO, [])
    return UnmanagedProcesses([Pgpu(0, "GPU-0", "card", 1)], cards, lambda: PODS, isolation)


def test_who_is_in_no_pod_is_an_outsider(places: dict[int, str]) -> None:
    made = watch(Cards(*PLACES, 99, os.getpid()))
    made.look()

    assert made.seen == {
        0: [UnmanagedProcess(0, 13, "name-13", "/user.slice/a"), UnmanagedProcess(0, 14, "name-14", "/qgpu/website")]
    }


def test_each_is_told_once_for_as_long_as_it_stays(places: dict[int, str]) -> None:
    cards = Cards(13)
    made = watch(cards)
    with capture_logs() as logs:
        made.look()
        made.look()
        cards.pids = (13, 14)
        made.look()

    assert [(line["pid"], line["log_level"]) for line in logs] == [(13, "warning"), (14, "warning")]


def test_many_at_once_are_counted(places: dict[int, str]) -> None:
    places |= dict.fromkeys(range(100, 150), "/user.slice/a")
    with capture_logs() as logs:
        watch(Cards(*range(100, 150))).look()

    assert [line.get("more") for line in logs] == [None] * 10 + [40]


def test_a_card_that_does_not_tell_is_missing(places: dict[int, str]) -> None:
    cards = Cards(13)
    made = watch(cards)
    made.look()
    cards.pids = None
    made.look()

    assert made.seen == {}


def test_names_that_a_terminal_would_obey_are_made_harmless() -> None:
    assert proc.printable(b"\x1b[2Jhi\xff") == "?[2Jhi?"
    assert proc.name(os.getpid()) != ""


def status(**more: Any) -> dict[str, Any]:
    files = {"enforced": True, "why": "", "refused": {"ioctl": 2, "mmap": 1}}
    return {"plane": "seccomp", "device_files": files | more, "excluded_cards": [], "unmanaged_processes": []}


def test_status_says_whether_device_files_are_the_pods_own() -> None:
    assert list(warnings(status())) == ["device files: isolated, 3 uses from outside refused"]
    assert list(warnings(status(enforced=False, why="no BPF"))) == ["device files: NOT isolated: no BPF"]


def test_status_names_who_is_outside() -> None:
    found = status() | {"unmanaged_processes": [{"gpu": 1, "pid": 7, "name": "x", "cgroup": "/a"}]}

    assert list(warnings(found))[1] == "outside pods: process 7 (x) on pGPU 1, cgroup /a"


def test_a_simulated_card_has_no_device_files() -> None:
    isolation = DeviceIsolation(Plane.SIM, DeviceFiles.AUTO, [])

    assert not isolation.enforced
    found = {"plane": "sim", "device_files": isolation.shown(), "excluded_cards": [], "unmanaged_processes": []}
    assert list(warnings(found)) == []
