"""A node whose cards the module shares: pods get their claims as from a kubelet, and containers as from CRI."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import qg

from qgpu.errors import DaemonUnreachableError
from qgpu.ipc.control_socket import Client
from tests.k8s.containerd import cri, engine
from tests.k8s.world import World, result

RELEASE = "2.1"
#: containerd's files: its snapshots cannot lie on the overlay that the VM's root is.
_HOME = Path("/run/containerd-test")
_ROOT = Path(__file__).resolve().parent.parent.parent.parent
_SIMCARD = str(_ROOT / "tests" / "vm" / "guest" / "simcard.py")
_LOAD = (sys.executable, str(_ROOT / "tests" / "vm" / "containers" / "load.py"))
#: What the load needs of this machine: its Python, and the libraries of that.
_MOUNTS = ("/usr", "/lib", "/lib64", sys.prefix, sys.base_prefix, str(_ROOT))
#: All is slow here: a program in Python starts in seconds.
_PATIENCE_S = 180


@dataclass
class Node:
    """The parts of the node, and the claims of its pods."""

    world: World
    runtime: cri.Runtime
    claims: list[dict[str, Any]] = field(default_factory=list)

    def pod(self, name: str, **consumed: str) -> str:
        """Start a pod with a claim of its own, whose container keeps the card busy; return the container's id.

        The scheduler has allocated ``consumed``; the driver prepares it.
        """
        claim = self.world.claim(result(**consumed), name=name)
        self.claims.append(claim)
        (pod,) = (each["uid"] for each in claim["status"]["reservedFor"])
        assert self.world.kubelet.prepare(claim, pod) == "", self.world.log
        sandbox = self.runtime.sandbox(name, pod)
        devices = self.world.kubelet.names(claim["metadata"]["uid"])
        mounts = {path: path for path in _MOUNTS}
        container = self.runtime.create(sandbox, "load", *devices, command=_LOAD, mounts=mounts)
        assert self.runtime.start(container) == ""
        return container

    def memory(self, container: str, mib: int) -> int:
        """Have another process of a container ask for card memory; return RM's status."""
        command = [*_LOAD, "memory", str(mib)]
        done = self.runtime.call("ExecSync", container_id=container, cmd=command, timeout=_PATIENCE_S)
        assert done.exit_code == 0, done.stderr
        return int(done.stdout, 16)

    def pods(self) -> Mapping[str, Any]:
        """qgpud's pods by the names of their Kubernetes pods."""
        with Client(self.world.runtime_dir) as client:
            return {pod["pod"]: pod for pod in client.call("pod.list")["pods"]}

    def used_ns(self) -> dict[str, int]:
        """The GPU time that each pod has had."""
        return {name: pod["usage"][0]["used_ns"] for name, pod in self.pods().items()}

    def busy(self, *names: str) -> bool:
        """Whether these pods all use the card."""
        try:
            pods = self.pods()
        except DaemonUnreachableError:
            return False
        return all(name in pods and pods[name]["usage"][0]["busy"] for name in names)

    def clear(self) -> None:
        """End all pods and give up their claims, as a kubelet does."""
        self.runtime.end_all()
        qg.until(lambda: not self.pods(), _PATIENCE_S)
        while self.claims:
            claim = self.claims.pop()
            assert self.world.kubelet.unprepare(claim["metadata"]["uid"]) == "", self.world.log
            self.world.forget(claim)
        assert not self.world.grants()


@contextmanager
def running() -> Iterator[Node]:
    """Run all parts."""
    world = World("--interval", "1", program=(_SIMCARD,), plane=("--plane", "kmod"), patience_s=_PATIENCE_S)
    try:
        world.start_daemon()
        world.kubelet.start()
        world.registered_driver()
        with engine.running(RELEASE, _HOME, world.cdi) as containerd:
            _HOME.joinpath("api").mkdir()
            with cri.runtime(containerd, cri.messages(_HOME / "api")) as runtime:
                yield Node(world, runtime)
    finally:
        world.close()
