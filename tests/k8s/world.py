"""A node as tests use it: a real qgpud on the simulator, a real driver, and the small kubelet and API server."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qgpu.errors import QgpuError
from qgpu.k8s.names import DRIVER
from qgpu.k8s.qgpud import Qgpud
from tests.cli import programs
from tests.k8s.api_server import ApiServer
from tests.k8s.kubelet import Kubelet

NODE = "node-1"
GI = 1024**3
_TIMEOUT_S = 15
_numbers = itertools.count(1)


class World:
    """One node, whose parts can be killed and started one by one."""

    def __init__(self, *options: str, gpus: int = 2, mode: str = "dra", grants: bool = True) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="qgpu-k8s.")  # short, because sockets lie in it
        self.directory = Path(self._temporary.name)
        self.runtime_dir = self.directory / "run"
        self.cdi = self.directory / "cdi"
        (self.directory / "qgpud.toml").write_text(f'[containers]\ncdi = "{self.cdi}"\n')
        self.api = ApiServer(NODE)
        self.kubelet = Kubelet(self.directory / "kubelet", self.api)
        self.qgpud = Qgpud(self.runtime_dir)
        self.mode, self.options, self._gpus = mode, options, gpus
        self.daemon: programs.Daemon | None = None
        self.driver: subprocess.Popen[bytes] | None = None

    def start(self) -> World:
        """Start all parts."""
        self.start_daemon()
        self.kubelet.start()
        self.start_driver()
        return self

    def start_daemon(self) -> None:
        """Start qgpud and wait until it serves."""
        options = ["--config", str(self.directory / "qgpud.toml"), "--state-dir", str(self.directory / "state")]
        self.daemon = programs.Daemon(self.runtime_dir, "--plane", "sim", "--sim-gpus", str(self._gpus), *options)
        self.eventually(self.daemon_answers)

    def daemon_answers(self) -> bool:
        """Whether qgpud answers."""
        try:
            self.qgpud.node()
        except QgpuError:
            return False
        return True

    def kill_daemon(self) -> None:
        """Kill qgpud."""
        if self.daemon is not None:
            self.daemon.stop(signal.SIGKILL)
            self.daemon = None

    def start_driver(self, *options: str) -> None:
        """Start the driver; does not wait."""
        identity = ["--kubeconfig", str(self.api.kubeconfig(self.directory / "kubeconfig"))]
        with (self.directory / "driver.log").open("ab") as log:
            self.driver = subprocess.Popen(
                [
                    *(sys.executable, "-m", "qgpu.k8s.main", self.mode, "--runtime-dir", str(self.runtime_dir)),
                    *("--kubelet-dir", str(self.kubelet.root), "--node-name", NODE, "--interval", "0.1"),
                    *(identity if self.mode == "dra" else ()),
                    *self.options,
                    *options,
                ],
                stderr=log,
                env=programs.environment(),
            )

    def registered_driver(self) -> None:
        """Start the driver and wait until the kubelet has it."""
        count = self.kubelet.registered
        self.start_driver()
        self.eventually(lambda: self.kubelet.registered > count)

    def kill_driver(self, number: signal.Signals = signal.SIGKILL) -> int:
        """End the driver; return its exit code."""
        driver, self.driver = self.driver, None
        if driver is None:
            return 0
        driver.send_signal(number)
        return driver.wait(_TIMEOUT_S)

    @property
    def log(self) -> str:
        """What the driver said."""
        return (self.directory / "driver.log").read_text()

    def close(self) -> None:
        """End everything."""
        self.kill_driver()
        if self.kubelet.running:
            self.kubelet.stop()
        self.kill_daemon()
        self.api.stop()
        self._temporary.cleanup()

    def eventually(self, what: Callable[[], Any], timeout_s: float = _TIMEOUT_S) -> Any:
        """Wait until ``what`` is true, and return what it returned."""
        deadline = time.monotonic() + timeout_s
        while not (found := what()):
            assert time.monotonic() < deadline, f"{what} not within {timeout_s:g} s; driver: {self.log[-3000:]}"
            time.sleep(0.01)
        return found

    def devices(self) -> list[dict[str, Any]]:
        """The devices of the slice, once it is there."""
        found = self.eventually(self.api.slice)
        devices: list[dict[str, Any]] = found["spec"]["devices"]
        return devices

    def grants(self) -> dict[str, Any]:
        """qgpud's prepared grants by UID."""
        return {grant["uid"]: grant for grant in self.qgpud.grants()}

    def files(self) -> set[str]:
        """The CDI devices that a runtime finds."""
        names = set()
        for path in self.cdi.glob("*.json"):
            content = json.loads(path.read_text())
            names |= {f"{content['kind']}={device['name']}" for device in content["devices"]}
        return names

    def claim(
        self,
        *results: dict[str, Any],
        name: str = "",
        pods: tuple[str, ...] = (),
        configurations: tuple[dict[str, Any], ...] = (),
        shared: bool = False,
    ) -> dict[str, Any]:
        """Create an allocated claim, and pods on this node that use it."""
        name = name or f"claim-{next(_numbers)}"
        pods = pods or (str(uuid.uuid4()),)
        owner = {"apiVersion": "v1", "kind": "Pod", "name": pods[0], "uid": pods[0], "controller": True}
        for pod in pods:
            self.pod(pod, name)
        return self.api.put(
            "resourceclaims",
            "team",
            name,
            {
                "metadata": {"namespace": "team", **({} if shared else {"ownerReferences": [owner]})},
                "spec": {},
                "status": {
                    "allocation": {"devices": {"results": list(results), "config": list(configurations)}},
                    "reservedFor": [{"resource": "pods", "name": pod, "uid": pod} for pod in pods],
                },
            },
        )

    def pod(self, uid: str, *claims: str) -> None:
        """Create a pod on this node."""
        self.api.put("pods", "team", uid, {"metadata": {"namespace": "team", "uid": uid}, "spec": {"claims": claims}})

    def forget(self, claim: dict[str, Any]) -> None:
        """Delete a claim and its pods."""
        self.api.delete("resourceclaims", "team", claim["metadata"]["name"])
        for pod in claim["status"]["reservedFor"]:
            self.api.delete("pods", "team", pod["uid"])


def result(gpu: int = 0, *, request: str = "gpu", share: str = "", **consumed: str) -> dict[str, Any]:
    """One device of an allocation."""
    capacity = {"memory": "1Gi", "cores": "0", "shares": "1"} | consumed
    return {
        "driver": DRIVER,
        "pool": NODE,
        "device": device(gpu),
        "request": request,
        "shareID": share or str(uuid.uuid4()),
        "consumedCapacity": capacity,
    }


def device(gpu: int) -> str:
    """The name of a simulated card's device."""
    return f"gpu-51300000-0000-0000-0000-{gpu:012d}"


def card(gpu: int) -> str:
    """The UUID of a simulated card."""
    return "GPU-" + device(gpu).removeprefix("gpu-")


def parameters(source: str, *requests: str, **values: Any) -> dict[str, Any]:
    """A configuration with our parameters."""
    content = {"apiVersion": "qgpu.io/v1", "kind": "GrantParameters", **values}
    return {"source": source, "requests": list(requests), "opaque": {"driver": DRIVER, "parameters": content}}
