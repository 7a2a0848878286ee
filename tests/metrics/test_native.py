"""The native series of one moment, where that is not seen on the simulator."""

from __future__ import annotations

import pytest

from qgpu.metrics import hami, native
from qgpu.metrics.text import render
from qgpu.metrics.view import GpuView, PodOnGpuView, PodView, View
from qgpu.model import Grant
from qgpu.model.container_labels import ContainerLabels
from qgpu.model.plane_api import Pgpu

CARD = (Pgpu(0, "GPU-0", "card", 1), "burst-share", "best-effort", 10**8)


def series(**more: object) -> dict[str, float]:
    """Return what Prometheus would read."""
    known = {"gpus": [GpuView(*CARD, unmanaged=2)]} | more
    view = View("1", "seccomp", "580", "node", 1.0, **known)  # type: ignore[arg-type]
    lines = render(native.families(view)).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


@pytest.mark.parametrize("isolated", [True, False])
def test_whether_device_files_are_kept_is_a_number(isolated: bool) -> None:
    found = series(isolated=isolated, isolation_refused={"ioctl": 3})

    assert found["qgpu_device_files_enforced"] == isolated
    assert found['qgpu_device_files_refused_total{call="ioctl"}'] == 3


def test_processes_outside_pods_are_counted_by_card() -> None:
    assert series()['qgpu_gpu_unmanaged_processes{gpu="0",UUID="GPU-0"}'] == 2


def test_overcommitted_memory_is_told_by_card() -> None:
    found = series(gpus=[GpuView(*CARD, memory_overcommit=2.0, memory_yielded=3, memory_shortage=4)])

    assert found['qgpu_gpu_memory_overcommit_ratio{gpu="0",UUID="GPU-0"}'] == 2
    assert found['qgpu_gpu_memory_yielded_bytes{gpu="0",UUID="GPU-0"}'] == 3
    assert found['qgpu_gpu_memory_shortage_bytes{gpu="0",UUID="GPU-0"}'] == 4


def test_a_kubernetes_containers_series_carry_its_names() -> None:
    labels = ContainerLabels("shop", "web-1", "model", "claim-a")
    pods = [PodOnGpuView("shop.web-1.model", Grant(), labels=labels), PodOnGpuView("train", Grant())]
    gpu = GpuView(Pgpu(0, "GPU-0", "card", 1), "burst-share", "best-effort", 10**8, pods=pods)
    view = View("1", "seccomp", "580", "node", 1.0, [gpu], {"x": PodView("x", 1, labels=labels)})
    ours, theirs = (render(each(view)).decode() for each in (native.families, hami.families))
    names = 'namespace="shop",kubernetes_pod="web-1",container="model",claim="claim-a"'

    assert f'qgpu_pod_busy{{gpu="0",UUID="GPU-0",pod="shop.web-1.model",{names}}} 0' in ours
    assert 'qgpu_pod_busy{gpu="0",UUID="GPU-0",pod="train"} 0' in ours
    assert f'qgpu_pod_memory_denied_total{{pod="x",{names}}} 1' in ours
    assert '{node="node",namespace="shop",pod="web-1",container="model",' in theirs
    assert '{node="node",namespace="",pod="train",container="",' in theirs


def test_where_there_are_no_device_files_nothing_is_said() -> None:
    assert not any("device_files" in name for name in series())
