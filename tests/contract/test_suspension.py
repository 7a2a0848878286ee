"""One contract for every plane: a suspended pod stands still and loses nothing, and other pods go on."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from qgpu.daemon.suspension_file import SuspensionFile
from qgpu.daemon.suspensions import Suspensions
from qgpu.model import NS_PER_S, Grant
from qgpu.model.plane_api import PodInfo
from qgpu.model.suspension import Residency
from tests.contract.rig import FLOOD, PULSE, Rig

PATIENCE_S = 120.0


@pytest.fixture
def moves(rig: Rig, tmp_path: Path) -> Suspensions:
    """What a daemon has, on this plane."""
    if rig.host.plane != "sim":
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            pytest.skip("no libcuda here: the cards of the virtual machine are emulated")

    def named(name: str) -> PodInfo:
        return next(pod for pod in rig.host.pods() if pod.name == name)

    return Suspensions(rig.host, named, SuspensionFile(tmp_path))


def test_a_suspended_pod_stands_still_and_then_goes_on(rig: Rig, moves: Suspensions) -> None:
    rig.host.admit("still", {rig.pgpu: Grant()})
    rig.host.admit("other", {rig.pgpu: Grant()})
    still, other = rig.start("still", FLOOD), rig.start("other", PULSE)
    rig.pass_time(NS_PER_S)
    moves.suspend("still")
    assert moves.wait("still", PATIENCE_S).residency is Residency.SUSPENDED
    before, others = rig.kernels(still), rig.kernels(other)
    rig.pass_time(NS_PER_S)

    assert rig.kernels(still) == before
    assert rig.kernels(other) > others
    moves.resume("still")
    assert moves.wait("still", PATIENCE_S).residency is Residency.RUNNING
    rig.pass_time(NS_PER_S)
    assert rig.kernels(still) > before


def test_a_suspended_pod_outlives_the_hosts_of_two_daemons(rig: Rig, moves: Suspensions, tmp_path: Path) -> None:
    rig.host.admit("still", {rig.pgpu: Grant(cores=50)})
    load = rig.start("still", FLOOD)
    moves.suspend("still")
    moves.wait("still", PATIENCE_S)
    rig.restart()
    successor = Suspensions(
        rig.host, lambda name: next(pod for pod in rig.host.pods() if pod.name == name), SuspensionFile(tmp_path)
    )
    before = rig.kernels(load)

    assert successor.state("still").residency is Residency.SUSPENDED
    assert [pod.grants[rig.pgpu].cores for pod in rig.host.pods()] == [50]
    successor.resume("still")
    assert successor.wait("still", PATIENCE_S).residency is Residency.RUNNING
    rig.pass_time(NS_PER_S)
    assert rig.kernels(load) > before
