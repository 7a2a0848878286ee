"""Pods are listed in one order everywhere: by pGPU, online ones first, then by name as people sort."""

from __future__ import annotations

from pathlib import Path

from qgpu.ipc.control_socket import Client
from tests.cli import programs
from tests.cli.programs import completed

MADE = {"job-10": (1, "offline"), "job-9": (0, "offline"), "chat": (0, "online"), "job-2": (1, "offline")}
ORDER = ["chat", "job-9", "job-2", "job-10"]


def test_pods_are_listed_by_pgpu_class_and_natural_name(tmp_path: Path) -> None:
    with programs.daemon(tmp_path / "run", "--sim-gpus", "2") as daemon, Client(daemon.runtime_dir) as client:
        for name, (gpu, pod_class) in MADE.items():
            client.call("pod.create", name=name, grants={str(gpu): {"class": pod_class}})
        status = daemon.ctl("status").stdout.rpartition("\n\n")[2]
        rows = [daemon.ctl("pod", "list").stdout, status]

        assert [[row.split()[0] for row in each.splitlines()[1:]] for each in rows] == [ORDER, ORDER]
        assert [pod["name"] for pod in daemon.json("pod", "list")["pods"]] == ORDER
        assert completed(daemon, "qgpuctl pod show ") == ORDER
