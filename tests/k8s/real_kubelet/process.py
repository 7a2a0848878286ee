"""The kubelet as a process of a test: by itself, without an API server, with static pods from a folder.

It has one path that no option moves, the folder of device plugins. A mount namespace of its own puts another folder
there, so that the host's, if it has one, stays as it is.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qgpu.linux import cgroup
from tests.k8s.containerd import image
from tests.k8s.containerd.engine import Containerd
from tests.k8s.real_kubelet import build

_DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
_CGROUP = "qgpu-test-kubelet"
#: The host's name; this kubelet appends it to the names of its pods.
HOST = "node"


class Kubelet:
    """A kubelet that runs the pods of one folder."""

    def __init__(self, home: Path, containerd: Containerd) -> None:
        self.root, self._pods, self._log = home / "kubelet", home / "pods", home / "kubelet.log"
        self._containerd = containerd
        for folder in (self.root / "device-plugins", self._pods):
            folder.mkdir(parents=True)
        self._config = home / "kubelet.json"
        self._config.write_text(json.dumps(_configuration(self._pods)))
        self.start()

    def start(self) -> None:
        """Start it."""
        _make_cgroups()
        command = [
            *(
                str(build.kubelet()),
                f"--config={self._config}",
                f"--root-dir={self.root}",
                "--cgroup-root",
                f"/{_CGROUP}",
            ),
            *("--container-runtime=remote", f"--container-runtime-endpoint=unix://{self._containerd.socket}"),
            *(f"--hostname-override={HOST}", f"--cert-dir={self.root}/pki", "--v=2"),
        ]
        _DEVICE_PLUGINS.mkdir(parents=True, exist_ok=True)
        mount = shlex.join(["mount", "--bind", str(self.root / "device-plugins"), str(_DEVICE_PLUGINS)])
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "slave", "sh", "-c", f"{mount} && exec {shlex.join(command)}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it; its pods run on."""
        self._process.send_signal(how)
        self._process.wait()

    def run(self, name: str, limits: Mapping[str, int] = {}, **more: Any) -> None:
        """Give it a pod with one container."""
        path = self._pods / f"{name}.json"
        beside = path.with_suffix(".new")  # it reads a file as soon as it is there
        beside.write_text(json.dumps(_pod(name, limits, **more)))
        beside.rename(path)

    def drop(self, name: str) -> None:
        """Take a pod away from it."""
        (self._pods / f"{name}.json").unlink(missing_ok=True)

    def drop_all(self) -> None:
        """Take all pods away from it."""
        for path in self._pods.glob("*.json"):
            path.unlink()

    def log(self) -> str:
        """Return the end of its log."""
        return self._log.read_text()[-4000:]


def _pod(name: str, limits: Mapping[str, int], **more: Any) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": image.NAME,
        "imagePullPolicy": "Never",
        "resources": {"limits": {resource: str(amount) for resource, amount in limits.items()}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {"hostNetwork": True, "terminationGracePeriodSeconds": 0, "containers": [container | more]},
    }


def _configuration(pods: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "staticPodPath": str(pods),
        "fileCheckFrequency": "1s",
        "syncFrequency": "2s",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "enableServer": False,
        "cgroupDriver": "cgroupfs",
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "evictionHard": {"nodefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "makeIPTablesUtilChains": False,
    }


def _make_cgroups() -> None:
    """Make the kubelet's cgroup in every hierarchy; with version 1 a new cpuset is empty and takes no process."""
    for hierarchy in {path for path in Path("/sys/fs/cgroup").iterdir() if path.is_dir()} | {cgroup.mount()}:
        if not (hierarchy / "cgroup.procs").exists():
            continue
        own = hierarchy / _CGROUP
        own.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (own / name).exists() and not (own / name).read_text().strip() and (hierarchy / name).exists():
                (own / name).write_text((hierarchy / name).read_text())
