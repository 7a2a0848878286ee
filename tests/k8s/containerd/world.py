"""A whole node whose containers a real containerd runs: it can be killed and started like the other parts.

The kubelet's part in containers is here: it starts them through CRI, and removes what no pod has any more.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from tests.k8s.containerd import cri, engine, needs
from tests.k8s.world import World, result

_ROOT = Path(__file__).resolve().parents[3]
_numbers = itertools.count(1)
#: What a program of this checkout needs in a container: its Python, and the libraries of that.
_MOUNTS = {str(path): str(path) for path in ("/usr", "/lib", "/lib64", sys.prefix, sys.base_prefix, _ROOT)}
_STATES = {0: "created", 1: "running", 2: "ended", 3: "unknown"}


class CriContainer:
    """One container of a Kubernetes pod that containerd runs."""

    def __init__(self, world: ContainerdWorld, pod: str, devices: Sequence[str], name: str, load: bool) -> None:
        self._world, self.pod, self._devices, self._name, self._load = world, pod, devices, name, load
        self._attempt = next(_numbers)
        #: By what containerd knows it; "" while it is not created.
        self.id = ""

    @property
    def cgroup(self) -> str:
        """Its cgroup, as qgpud calls it; "" while it is not created."""
        return f"{self._world.cgroup_parent}/{self.pod}/{self.id}" if self.id else ""

    def bind(self, may_be_refused: bool = False) -> str:
        """Start it, in its pod's sandbox; return what is said against it, which must be nothing unless it may be."""
        command = (sys.executable, "-m", "qgpu.load.main", "--duration", "0s") if self._load else ()
        more = self._world.variables(self.pod, self._name) if self._load else {}
        mounts = _MOUNTS | {str(self._world.runtime_dir): str(self._world.runtime_dir)} if self._load else {}
        self._world.containers.append(self)
        try:
            sandbox = self._world.sandbox(self.pod)
            self.id = self._world.runtime.create(
                sandbox, self._name, *self._devices, command=command, env=more, mounts=mounts, attempt=self._attempt
            )
            said = self._world.runtime.start(self.id)
        except grpc.RpcError as error:
            said = str(error.details())
        assert may_be_refused or not said, said
        return said

    def lacks(self) -> str:
        """Say whether containerd runs it; "" if it does, or is away itself."""
        if not self._world.runs("containerd"):
            return ""
        status = self._world.runtime.call("ContainerStatus", container_id=self.id).status
        return "" if _STATES[status.state] == "running" else f"container {self.id} {_STATES[status.state]}: {status}"

    def exceeds(self, _memory: int) -> str:
        """Say whether it has ended; on a simulated card it asks for no memory."""
        return self.lacks()

    def kill(self) -> None:
        """End it. While containerd is away, its processes end by themselves, and it is removed later."""
        self._world.containers.remove(self)
        self._world.collect()
        if self.id:
            engine.kill_below(self.cgroup)


class ContainerdWorld(World):
    """One node with containerd."""

    runtime: cri.Runtime

    def __init__(self, *options: str, release: str = engine.RELEASE) -> None:
        super().__init__(*options)
        self.cgroup_parent = f"/qgpu-k8s-{os.getpid()}-{next(_numbers)}"
        self.containerd = engine.Containerd(release, self.directory / "containerd", self.cdi)
        #: The containers that pods have.
        self.containers: list[CriContainer] = []
        self._sandboxes: dict[str, cri.Sandbox] = {}

    def start(self) -> ContainerdWorld:
        """Start all parts."""
        needs.check(containerd=lambda: engine.programs(self.containerd.release), cri=cri.description)
        messages = self.directory / "cri"
        messages.mkdir()
        self._messages = cri.messages(messages)
        super().start()
        self.start_containerd()
        self.containerd.load_image()
        return self

    def start_containerd(self) -> None:
        """Start it and wait until it serves the kubelet."""
        self.containerd.start()
        self.runtime = cri.connected(self.containerd, self._messages, self.cgroup_parent)
        self.eventually(self._runtime_answers)

    def _runtime_answers(self) -> bool:
        with suppress(grpc.RpcError):
            self.runtime.call("Status")
            return True
        return False

    def kill_containerd(self) -> None:
        """Kill it; containers go on."""
        self.containerd.end(signal.SIGKILL)

    @property
    def parts(self) -> tuple[str, ...]:
        """containerd too."""
        return (*super().parts, "containerd")

    def runs(self, *parts: str) -> bool:
        """Whether all of these parts are there."""
        others = [part for part in parts if part != "containerd"]
        return super().runs(*others) and ("containerd" not in parts or self.containerd.process is not None)

    def start_part(self, part: str) -> None:
        """Start what is away."""
        self.start_containerd() if part == "containerd" else super().start_part(part)

    def fail(self, part: str) -> None:
        """Kill a part, or switch the node off."""
        self.kill_containerd() if part == "containerd" else super().fail(part)

    def switch_off(self) -> None:
        """Lose containerd and all that it runs, too."""
        self.containerd.switch_off(self.cgroup_parent)
        self._sandboxes.clear()
        super().switch_off()

    def close(self) -> None:
        """End everything."""
        self.containerd.switch_off(self.cgroup_parent)
        engine.remove_cgroups(self.cgroup_parent)
        super().close()

    def container(self, pod: str, devices: list[str], name: str = "main", *, load: bool = False) -> CriContainer:
        """Make a container of a pod that is given devices; it sleeps, or with ``load`` keeps its card busy."""
        return CriContainer(self, pod, devices, name, load)

    def variables(self, pod: str, container: str) -> Mapping[str, str]:
        """What a load's environment says, as ``qgpuctl run`` would."""
        return {
            "QGPU_PLANE": "sim",
            "QGPU_POD": self.pod_name(pod, container),
            "QGPU_RUNTIME_DIR": str(self.runtime_dir),
            "PYTHONPATH": str(_ROOT),
        }

    @staticmethod
    def pod_name(pod: str, container: str) -> str:
        """qgpud's name for a pod's container."""
        return f"shop.{pod}.{container}"

    def sandbox(self, pod: str) -> cri.Sandbox:
        """Return a pod's sandbox, started if need be. Raises grpc.RpcError."""
        if pod not in self._sandboxes:
            self._sandboxes[pod] = self.runtime.sandbox(pod, pod, attempt=next(_numbers))
        return self._sandboxes[pod]

    def collect(self) -> None:
        """Remove the containers and sandboxes that no pod has, as a kubelet does; what cannot be now stays."""
        if not self.runs("containerd"):
            return
        with suppress(grpc.RpcError):
            containers, sandboxes = self.strays()
            for container in containers:
                self.runtime.call("StopContainer", container_id=container, timeout=0)
                self.runtime.call("RemoveContainer", container_id=container)
            for sandbox in sandboxes:
                self._sandboxes = {pod: each for pod, each in self._sandboxes.items() if each.id != sandbox}
                self.runtime.call("StopPodSandbox", pod_sandbox_id=sandbox)
                self.runtime.call("RemovePodSandbox", pod_sandbox_id=sandbox)

    def strays(self) -> tuple[list[str], list[str]]:
        """Return the containers and the sandboxes that containerd has and no pod. Raises grpc.RpcError."""
        ours, pods = {each.id for each in self.containers}, {each.pod for each in self.containers}
        kept = {each.id for pod, each in self._sandboxes.items() if pod in pods}
        containers = [each.id for each in self.runtime.call("ListContainers").containers]
        sandboxes = [each.id for each in self.runtime.call("ListPodSandbox").items]
        return [each for each in containers if each not in ours], [each for each in sandboxes if each not in kept]

    def start_pod(self, pod: str, *, load: bool = False, **consumed: str) -> tuple[dict[str, Any], CriContainer]:
        """Start a pod with a claim of its own, which the scheduler gave this part; return the claim and a container."""
        claim = self.claim(result(**consumed), pods=(pod,))
        assert self.kubelet.prepare(claim, pod) == "", self.log
        container = self.container(pod, self.kubelet.names(claim["metadata"]["uid"]), load=load)
        container.bind()
        return claim, container

    def give_up(self, claim: dict[str, Any]) -> None:
        """Give up a claim as a kubelet does, when its containers have ended."""
        uid = claim["metadata"]["uid"]
        self.eventually(lambda: uid not in self.kubelet.checkpoint or self.kubelet.unprepare(uid) == "")
        self.forget(claim)

    def start_all(self) -> None:
        """Start all that is away."""
        for part in self.parts:
            if not self.runs(part):
                self.start_part(part)

    def clear(self) -> None:
        """Start all that is away, end all pods, and give up all claims."""
        self.start_all()
        for container in list(self.containers):
            container.kill()
        for claim in self.api.of("resourceclaims"):
            self.give_up(claim)
        self.eventually(lambda: not self.grants())

    def ratio(self, larger: str, smaller: str, settle_s: float, measure_s: float) -> float:
        """Have two pods' loads run for a while; return how often the GPU time of one goes into that of the other."""
        two, one = self._had_ns([larger, smaller], settle_s, measure_s)
        return two / one

    def card_time(self, pod: str, settle_s: float, measure_s: float) -> float:
        """Have a pod's load run for a while; return which part of that time it had on its card."""
        (had_ns,) = self._had_ns([pod], settle_s, measure_s)
        return had_ns / 1e9 / measure_s

    def _had_ns(self, pods: Sequence[str], settle_s: float, measure_s: float) -> list[int]:
        names = {self.pod_name(pod, "main") for pod in pods}
        self.eventually(
            lambda: names <= {pod["name"] for pod in self.ask("pod.list")["pods"] if pod["usage"][0]["busy"]}
        )
        time.sleep(settle_s)
        before = self.used_ns(*pods)
        time.sleep(measure_s)
        return [after - then for after, then in zip(self.used_ns(*pods), before, strict=True)]

    def used_ns(self, *pods: str) -> list[int]:
        """Return the GPU time that each of these pods' main containers has had."""
        found: dict[str, Any] = {pod["name"]: pod["usage"][0]["used_ns"] for pod in self.ask("pod.list")["pods"]}
        return [found[self.pod_name(pod, "main")] for pod in pods]
