"""The module's pods as the daemon sees them, on a stand-in for /dev/qgpu."""

from __future__ import annotations

import os

import pytest

from qgpu.errors import RefusedError
from qgpu.linux import cgroup
from qgpu.planes.kmod.host import KmodHost
from tests.planes.kmod import test_left_pods
from tests.planes.kmod.test_left_pods import FakeDevice, FakePod

device, left, host = test_left_pods.device, test_left_pods.left, test_left_pods.host


@pytest.fixture(autouse=True)
def entered(host: KmodHost, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Lay out cgroups 5 (/web) and 6 (/engine/a), note who enters, and put every process into /engine/a/b."""
    moved: list[tuple[int, str]] = []
    monkeypatch.setattr(cgroup, "find", lambda ident, _likely: {5: "/job/qgpu-web", 6: "/engine/a"}.get(ident))
    monkeypatch.setattr(cgroup, "of", lambda _pid: "/engine/a/b")
    monkeypatch.setattr(cgroup, "enter", lambda _name, pid, path: moved.append((pid, path)))
    host._paths = {}
    return moved


def test_a_process_enters_the_cgroup_with_the_pods_id(
    device: FakeDevice, host: KmodHost, entered: list[tuple[int, str]]
) -> None:
    device.pods = {1: FakePod("web", cgroup=5)}
    host.attach("web", os.getpid(), [])

    assert entered == [(os.getpid(), "/job/qgpu-web")]


def test_nobody_enters_a_pod_whose_cgroup_is_gone(
    device: FakeDevice, host: KmodHost, entered: list[tuple[int, str]]
) -> None:
    """Another cgroup may have its name by now, but not its id."""
    device.pods = {1: FakePod("web", cgroup=7)}
    with pytest.raises(RefusedError, match="its cgroup is gone"):
        host.attach("web", os.getpid(), [])

    assert not entered


def test_a_process_in_a_joined_cgroup_is_in_the_pod(
    device: FakeDevice, host: KmodHost, entered: list[tuple[int, str]]
) -> None:
    device.pods = {1: FakePod("web", cgroup=7, joined=[6])}
    host.attach("web", os.getpid(), [])

    assert not entered
