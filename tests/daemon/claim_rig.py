"""A daemon's requests with claims, containers in cgroups of their own, and a simulated host that remembers memory.

The host outlives the daemon, as the kernel module and the guardian do.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qgpu.config import Config
from qgpu.daemon.control_requests import ControlRequests
from qgpu.daemon.plane_choice import PlaneChoice
from qgpu.daemon.prepared_grants import FOLDER, PreparedGrants
from qgpu.daemon.settings_file import SettingsFile
from qgpu.ipc import wire
from qgpu.ipc.control_socket import Session
from qgpu.linux import cgroup
from qgpu.model import Grant
from qgpu.model.plane_api import PodInfo
from qgpu.model.plane_names import Plane
from qgpu.planes.sim.host import Clock, SimHost
from qgpu.runtime.claim_cdi import ClaimCdiFiles

GIB = 1 << 30
CARDS = 2
MEMORY = SimHost(1).pgpus()[0].memory


class RememberingHost(SimHost):
    """Simulated cards on which pods have memory, up to their limits."""

    def __init__(self) -> None:
        super().__init__(CARDS, Clock.REAL)
        self.had: dict[tuple[str, int], int] = {}
        #: A pod that takes all it may just before a grant is changed.
        self.greedy = ""
        #: Memory that ended pods have left behind, by card.
        self.left: dict[int, int] = {}
        #: Whether another process keeps what pods have that end now, and what is kept so, by pod and card.
        self.keeps = False
        self.kept: dict[str, dict[int, int]] = {}

    def pods(self) -> Sequence[PodInfo]:
        """List the pods with the memory that they have."""
        return [
            replace(pod, memory={index: self.had.get((pod.name, index), 0) for index in pod.grants})
            for pod in super().pods()
        ]

    def retire(self, name: str) -> None:
        """Remove a pod and its memory, unless it is kept."""
        super().retire(name)
        if self.keeps:
            self.kept[name] = {index: size for (pod, index), size in self.had.items() if pod == name}
        self.had = {key: size for key, size in self.had.items() if key[0] != name}

    def amend(self, name: str, grants: Mapping[int, Grant]) -> None:
        """Change a pod's grants; the greedy pod is faster."""
        for pod in self.pods():
            for index, grant in pod.grants.items() if pod.name == self.greedy else ():
                self.had[pod.name, index] = max(self.had.get((pod.name, index), 0), grant.memory or 0)
        super().amend(name, grants)

    def orphaned_memory(self) -> Mapping[int, int]:
        """Return what ended pods have left behind."""
        kept = Counter(self.left)
        for each in self.kept.values():
            kept.update(each)
        return dict(kept)

    def names_in_use(self) -> Collection[str]:
        """Return the pods of which memory is kept."""
        return list(self.kept)

    def allocate(self, name: str, index: int, size: int) -> bool:
        """Give a pod memory if its limit allows, and tell whether it does."""
        grant = next(pod for pod in self.pods() if pod.name == name).grants[index]
        wanted = self.had.get((name, index), 0) + size
        if grant.memory is not None and wanted > grant.memory:
            return False
        self.had[name, index] = wanted
        return True


@dataclass
class FakeContainer:
    """A process in a cgroup of its own, and what its runtime says of it."""

    names: tuple[str, str, str] = ("shop", "web", "model")
    uid: str = "pod-1"
    devices: tuple[str, ...] = ()
    annotations: dict[str, str] = field(default_factory=dict)
    env: list[str] = field(default_factory=list)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    nodes: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        self.at = cgroup.create(f"c-{uuid.uuid4().hex}")
        cgroup.enter("", self.process.pid, self.at)

    def message(self) -> dict[str, Any]:
        """Return what the hook sends."""
        keys = ("sandbox-namespace", "sandbox-name", "container-name", "sandbox-uid")
        kubernetes = dict(zip((f"io.kubernetes.cri.{key}" for key in keys), (*self.names, self.uid), strict=True))
        return {
            "op": "container.bind",
            "id": self.id,
            "pid": self.process.pid,
            "annotations": {key: value for key, value in kubernetes.items() if value} | self.annotations,
            "env": self.env,
            "devices": self.nodes,
            "rules": [{"allow": False, "access": "rwm"}],
            "seccomp": None,
            "prepared": [f"qgpu.io/claim={name}" for name in self.devices],
        }

    def die(self) -> None:
        """End the process; the runtime has not removed the cgroup yet."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """End it for good."""
        self.die()
        cgroup.remove("", self.at)


class Rig:
    """Daemons one after the other, over one state directory, one CDI directory and one host."""

    def __init__(self, directory: Path) -> None:
        self.state, self.cdi = directory / "state", directory / "cdi"
        self.host = RememberingHost()
        self.uuids = [pgpu.uuid for pgpu in self.host.pgpus()]
        self.containers: list[FakeContainer] = []
        self._numbers = itertools.count(1)
        self.session = self._session()
        self.requests = self._start()

    def _session(self) -> Session:
        return Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=os.pidfd_open(os.getpid()))

    def _start(self, config: Config | None = None) -> ControlRequests:
        files = ClaimCdiFiles(self.host.pgpus(), Path("/run/qgpu/qgpud.sock"), self.cdi)
        prepared = PreparedGrants(self.state, self.host.pgpus(), files)
        return ControlRequests(
            self.host, PlaneChoice(Plane.SIM, "test"), config or Config(), SettingsFile(self.state), prepared=prepared
        )

    def restart(self, config: Config | None = None) -> None:
        """Let another daemon take over."""
        self.requests.close()
        for call in self.session.at_end:
            call()
        os.close(self.session.process or -1)
        self.session = self._session()
        self.requests = self._start(config)

    def close(self) -> None:
        """End everything."""
        self.requests.close()
        for each in self.containers:
            with suppress(ProcessLookupError):
                each.end()
        os.close(self.session.process or -1)

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Make a request as root."""
        return self.requests.handle(self.session, {"op": op, **arguments}, [])

    def device(self, card: int = 0, request: str = "gpu", share: str = "", **limits: Any) -> dict[str, Any]:
        """Describe a device of a claim."""
        given = {"class": "offline", "cores": None, "memory": None, "latency_target_ns": None} | limits
        return {"request": request, "gpu": self.uuids[card], "share": share} | given

    def prepare(
        self, uid: str, *devices: Mapping[str, Any], consumers: Sequence[str] = ("pod-1",), namespace: str = "shop"
    ) -> tuple[str, ...]:
        """Prepare a claim and return the names of its devices."""
        answer = self.ask(
            "grant.prepare",
            uid=uid,
            namespace=namespace,
            name=f"claim-{uid}",
            consumers=list(consumers),
            devices=list(devices),
        )
        return tuple(each["cdi"].partition("=")[2] for each in answer["devices"])

    def container(self, *devices: str, **more: Any) -> FakeContainer:
        """Make a container that is given these devices, and the cards that they are of."""
        made = FakeContainer(devices=devices, **more)
        prepared = self.requests.pods.prepared.by_name
        cards = {prepared[name][1].gpu for name in devices if name in prepared} & set(self.uuids)
        made.env += [f"QGPU_GPU_{self.uuids.index(gpu)}={gpu}" for gpu in sorted(cards)]
        self.containers.append(made)
        return made

    def bind(self, container: FakeContainer) -> str:
        """Send what its hook sends, and return the name of its pod."""
        return str(self.requests.handle(self.session, container.message(), [])["name"])

    def pods(self) -> dict[str, dict[str, Any]]:
        """Return the daemon's pods by name."""
        return {pod["name"]: pod for pod in self.ask("pod.list")["pods"]}

    def grant(self, pod: str, card: int = 0) -> tuple[str, int | None, int | None]:
        """Return a pod's class, quota and memory limit on a card."""
        found = next(each for each in self.pods()[pod]["grants"] if each["gpu"] == card)
        return found["class"], found["cores"], found["memory"]

    def listed(self) -> dict[str, dict[str, Any]]:
        """Return the prepared grants by UID."""
        return {each["uid"]: each for each in self.ask("grant.list")["grants"]}

    def outside(self, card: int = 0) -> dict[str, int]:
        """Return what pods without a claim hold of a card."""
        found: dict[str, int] = self.ask("gpu.list")["gpus"][card]["held_outside"]
        return found

    def files(self) -> tuple[set[str], set[str]]:
        """Return the UIDs of the claims that have a state file, and of those that have a CDI file."""
        kept, shown = self.state / FOLDER, self.cdi
        return (
            {path.name.removesuffix(".json") for path in kept.iterdir()} if kept.exists() else set(),
            {path.name.removeprefix("qgpu-claim-").removesuffix(".json") for path in shown.iterdir()}
            if shown.exists()
            else set(),
        )

    def specification(self, uid: str) -> dict[str, Any]:
        """Return a claim's CDI file."""
        found: dict[str, Any] = json.loads((self.cdi / f"qgpu-claim-{uid}.json").read_text())
        return found
