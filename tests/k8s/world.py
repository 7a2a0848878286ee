"""A node as tests use it: a real qgpud on the simulator, a real driver, and the small kubelet and API server."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qgpu.errors import QgpuError
from qgpu.ipc.control_socket import Client
from qgpu.k8s.names import DRIVER
from qgpu.k8s.qgpud import Qgpud
from tests.cli import programs
from tests.k8s.api_server import ApiServer
from tests.k8s.container import Container, ContainerLike
from tests.k8s.holdings import on_disk
from tests.k8s.kubelet import Kubelet

NODE = "node-1"
GI = 1024**3
#: How long a test waits for an event: less than pytest does, so that it can tell which one.
PATIENCE_S = 240.0
#: How long qgpud may take to answer.
_ANSWER_S = 60.0
_numbers = itertools.count(1)


class World:
    """One node, whose parts can be killed and started one by one."""

    #: How many cards, and the bytes of each that can be allocated.
    cards, memory = 2, 140 * GI
    #: Where what a node loses lies, if that is there.
    volatile_at = Path("/dev/shm")

    def __init__(
        self,
        *options: str,
        gpus: int = cards,
        mode: str = "dra",
        program: Sequence[str] = ("-m", "qgpu.daemon.main"),
        plane: Sequence[str] = (),
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Prepare a node. ``program`` is qgpud and ``plane`` its options, by default for simulated cards."""
        self._temporary = tempfile.TemporaryDirectory(prefix="qgpu-k8s.")  # short, because sockets lie in it
        self.directory = Path(self._temporary.name)
        #: What a node loses when it is switched off: in memory, as /run is.
        self._volatile = tempfile.TemporaryDirectory(
            prefix="qgpu-k8s.", dir=self.volatile_at if self.volatile_at.is_dir() else None
        )
        self.volatile = Path(self._volatile.name)
        self.runtime_dir = self.volatile / "run"
        self.cdi = self.volatile / "cdi"
        (self.directory / "qgpud.toml").write_text(f'[containers]\ncdi = "{self.cdi}"\n')
        self.api = ApiServer(NODE)
        self.kubelet = Kubelet(self.directory / "kubelet", self.api)
        self.qgpud = Qgpud(self.runtime_dir)
        self.mode, self.options = mode, options
        self._program, self._plane = program, plane or ("--plane", "sim", "--sim-gpus", str(gpus))
        self._patience_s = patience_s
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
        self.daemon = programs.Daemon(self.runtime_dir, *self._plane, *options, program=self._program)
        self.eventually(self.daemon_answers)

    # what can fail and come back, by name

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that stay away until they are started; no node in device-plugin mode needs an API server."""
        return ("driver", "kubelet", *(["api"] if self.mode == "dra" else []), "qgpud")

    @property
    def perils(self) -> tuple[str, ...]:
        """All that can fail."""
        return (*self.parts, "node")

    def runs(self, *parts: str) -> bool:
        """Whether all of these parts are there."""
        there = {
            "driver": self.driver is not None and self.driver.poll() is None,
            "kubelet": self.kubelet.running,
            "api": self.api.running,
            "qgpud": self.daemon is not None,
        }
        return all(there[part] for part in parts)

    def start_part(self, part: str) -> None:
        """Start what is away."""
        {
            "driver": self.start_driver,
            "kubelet": self.kubelet.start,
            "api": self.api.start,
            "qgpud": self.start_daemon,
        }[part]()

    def fail(self, part: str) -> None:
        """Kill a part that is there, or switch the node off."""
        {
            "driver": self.kill_driver,
            "kubelet": self.kubelet.stop,
            "api": self.api.stop,
            "qgpud": self.kill_daemon,
            "node": self.switch_off,
        }[part]()

    def switch_off(self) -> None:
        """End what runs on the node, and lose what it has in memory. Its containers are the caller's to end."""
        self.kill_driver()
        if self.kubelet.running:
            self.kubelet.stop()
        self.kill_daemon()
        for path in self.volatile.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

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
                    *("--device-plugin-dir", str(self.kubelet.directory.device_plugins)),
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
        return driver.wait(self._patience_s)

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
        self._volatile.cleanup()
        self._temporary.cleanup()

    def eventually(self, what: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """Wait until ``what`` is true, and return what it returned."""
        timeout_s = self._patience_s if timeout_s is None else timeout_s
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
        return {grant["uid"]: grant for grant in self.ask("grant.list")["grants"]}

    def ask(self, operation: str) -> dict[str, Any]:
        """Make a request to qgpud."""
        with Client(self.runtime_dir, _ANSWER_S) as client:
            return client.call(operation)

    def files(self) -> set[str]:
        """The CDI devices that a runtime finds."""
        names = set()
        for path in self.cdi.glob("*.json"):
            with suppress(FileNotFoundError):  # it has just been removed
                content = json.loads(path.read_text())
                names |= {f"{content['kind']}={device['name']}" for device in content["devices"]}
        return names

    def on_disk(self) -> dict[str, set[str]]:
        """The prepared devices by the place where qgpud keeps them."""
        return on_disk(self.cdi, self.directory / "state")

    def container(self, pod: str, devices: list[str], name: str = "main") -> ContainerLike:
        """Make a container of a pod that is given devices."""
        return Container(self, pod, devices, name)

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
