"""The native series of one moment, where that is not seen on the simulator."""

from __future__ import annotations

import pytest

from qgpu.metrics import native
from qgpu.metrics.text import render
from qgpu.metrics.view import GpuView, View
from qgpu.model.plane_api import Pgpu


def series(**more: object) -> dict[str, float]:
    """Return what Prometheus would read."""
    gpus = [GpuView(Pgpu(0, "GPU-0", "card", 1), "burst-share", "best-effort", 10**8, unmanaged=2)]
    view = View("1", "seccomp", "580", "node", 1.0, gpus, **more)  # type: ignore[arg-type]
    lines = render(native.families(view)).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


@pytest.mark.parametrize("isolated", [True, False])
def test_whether_device_files_are_kept_is_a_number(isolated: bool) -> None:
    found = series(isolated=isolated, isolation_refused={"ioctl": 3})

    assert found["qgpu_device_files_enforced"] == isolated
    assert found['qgpu_device_files_refused_total{call="ioctl"}'] == 3


def test_processes_outside_pods_are_counted_by_card() -> None:
    assert series()['qgpu_gpu_unmanaged_processes{gpu="0",UUID="GPU-0"}'] == 2


def test_where_there_are_no_device_files_nothing_is_said() -> None:
    assert not any("device_files" in name for name in series())
