"""The daemon's end of the BPF program: loaded where it can be, told of pods, taken away when there are none."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from structlog.testing import capture_logs

from qgpu.config import DeviceFiles
from qgpu.daemon.device_isolation import DeviceIsolation
from qgpu.errors import NotSupportedError
from qgpu.linux import cgroup
from qgpu.lsm import device_files, pins
from qgpu.lsm.device_files import Refusal
from qgpu.model.plane_api import PodInfo
from qgpu.model.plane_names import Plane

PODS = [PodInfo("web", pids=(10,), cgroup="/qgpu/web"), PodInfo("gone")]


class FakeKernel:
    """A kernel that takes the program, or says why not."""

    def __init__(self) -> None:
        self.why = ""
        self.full = False
        self.pods: list[str] = []
        self.calls: list[str] = []
        self.seen = [Refusal(7, "x", "ioctl", 1, 1)]

    def load(self, pods: Iterable[str]) -> FakeKernel:
        if self.why:
            raise NotSupportedError(self.why)
        self.set_pods(pods)
        return self

    def set_pods(self, pods: Iterable[str]) -> None:
        if self.full:
            raise OSError(7, "Argument list too long")
        self.pods = list(pods)

    def refused(self) -> dict[str, int]:
        return {"ioctl": 1}

    def refusals(self) -> list[Refusal]:
        return self.seen

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    made = FakeKernel()
    monkeypatch.setattr(device_files, "load", made.load)
    monkeypatch.setattr(device_files, "majors", lambda: {195})
    monkeypatch.setattr(pins, "remove", lambda: made.calls.append("remove"))
    monkeypatch.setattr(cgroup, "pids", lambda path: (1,))
    return made


def isolation(plane: Plane = Plane.SECCOMP, wanted: DeviceFiles = DeviceFiles.AUTO) -> DeviceIsolation:
    return DeviceIsolation(plane, wanted, PODS)


@pytest.mark.parametrize("plane", [Plane.SECCOMP, Plane.KMOD])
def test_pods_that_are_there_are_told_at_the_start(kernel: FakeKernel, plane: Plane) -> None:
    made = isolation(plane)

    assert made.enforced
    assert made.shown() == {"enforced": True, "why": "", "refused": {"ioctl": 1}}
    assert kernel.pods == ["/qgpu/web"]


def test_a_kernel_that_does_not_take_it_is_no_obstacle(kernel: FakeKernel) -> None:
    kernel.why = "this kernel runs no BPF LSM"
    with capture_logs() as logs:
        made = isolation()
        made.set_pods(PODS)
        made.close([])

    assert made.shown() == {"enforced": False, "why": kernel.why, "refused": {}}
    assert [line["reason"] for line in logs] == [kernel.why]
    assert kernel.calls == []


def test_a_guardian_that_cannot_be_known_is_not_locked_out(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "pids", lambda path: ())

    assert "guardian" in isolation().why
    assert isolation(Plane.KMOD).enforced, "there is none on that plane"


def test_switched_off_it_is_taken_away(kernel: FakeKernel) -> None:
    made = isolation(wanted=DeviceFiles.OFF)

    assert not made.enforced
    assert kernel.calls == ["remove"]


@pytest.mark.parametrize(("pods", "calls"), [([], ["close", "remove"]), (PODS, ["close"]), (None, ["close"])])
def test_it_stays_unless_there_are_surely_no_pods(
    kernel: FakeKernel, pods: list[PodInfo] | None, calls: list[str]
) -> None:
    isolation().close(pods)

    assert kernel.calls == calls


def test_a_pod_that_finds_no_room_is_said_once(kernel: FakeKernel) -> None:
    made = isolation()
    kernel.full = True
    with capture_logs() as logs:
        made.set_pods(PODS)
        made.set_pods(PODS)
    assert len(logs) == 1
    why = "the BPF program does not know every pod: [Errno 7] Argument list too long"
    assert made.shown() == {"enforced": False, "why": why, "refused": {"ioctl": 1}}
    kernel.full = False
    made.set_pods(PODS)
    assert made.shown() == {"enforced": True, "why": "", "refused": {"ioctl": 1}}


def test_who_was_refused_is_listed_when_that_is_news(kernel: FakeKernel) -> None:
    made = isolation()

    assert [made.refusals(), made.refusals()] == [kernel.seen, []]
    kernel.seen = [Refusal(7, "x", "ioctl", 1, 2)]
    assert made.refusals() == kernel.seen
