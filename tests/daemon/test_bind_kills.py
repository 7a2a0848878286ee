"""The daemon is killed at any line of what makes a container or a job a pod. Who asks the next one again gets all."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import qgpu
from qgpu.config import Config
from qgpu.daemon import container_notes, slurm_steps
from qgpu.daemon.control_requests import ControlRequests
from qgpu.daemon.plane_choice import PlaneChoice
from qgpu.daemon.prepared_grants import PreparedGrants
from qgpu.daemon.settings_file import SettingsFile
from qgpu.daemon.slurm_jobs import SlurmJobs
from qgpu.ipc import wire
from qgpu.ipc.control_socket import Session
from qgpu.linux import cgroup
from qgpu.model.plane_names import Plane
from qgpu.planes.sim.host import Clock, SimHost
from qgpu.planes.sim.pods_file import PodsFile
from qgpu.runtime.claim_cdi import ClaimCdiFiles
from tests.daemon.claim_rig import GIB, FakeContainer
from tests.daemon.killed_daemon import DONE, KILLED, in_process, killed_after
from tests.simulation import MORE

pytestmark = pytest.mark.root

#: Every so many lines, the daemon is killed.
STRIDE = 7 if MORE > 1 else 83
OURS = str(Path(qgpu.__file__).parent)
#: Threads of their own run these at any time.
ELSEWHERE = ("/sched/", "/policies/")


class Node:
    """A daemon over a host whose pods outlive it, as the module's and the guardian's do."""

    def __init__(self, directory: Path) -> None:
        self.host = SimHost(1, Clock.REAL, pods_file=PodsFile(directory / "kept"))
        files = ClaimCdiFiles(self.host.pgpus(), Path("/run/qgpu/root.sock"), directory / "cdi")
        prepared = PreparedGrants(directory, self.host.pgpus(), files)
        self.requests = ControlRequests(
            self.host, PlaneChoice(Plane.SIM, "test"), Config(), SettingsFile(directory), prepared=prepared
        )
        self.requests._changing["slurm.bind"] = SlurmJobs(self.requests.pods, Plane.SECCOMP).bind

    def ask(self, message: dict[str, Any], pid: int = 0) -> dict[str, Any]:
        """Make a request as a process of root's."""
        pid = pid or os.getpid()
        peer = Session(wire.Peer(pid, 0, 0), may_change=True, process=os.pidfd_open(pid))
        return self.requests.handle(peer, message, [])


class Start:
    """What starts, how it asks, and what it then has."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def ask(self, node: Node) -> None:
        """Make the request."""
        raise NotImplementedError

    def check(self, node: Node) -> None:
        """Check what came of it."""
        raise NotImplementedError

    def close(self) -> None:
        """End what has started."""


class Plain(Start):
    """A container without a claim."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        asked = {"qgpu.io/name": "web", "qgpu.io/memory": "4GiB", "qgpu.io/cores": "30"}
        self.container = FakeContainer(names=("", "", ""), uid="", env=["QGPU_GPU_0="], annotations=asked)

    def ask(self, node: Node) -> None:
        node.ask(self.container.message())

    def check(self, node: Node) -> None:
        (pod,) = node.host.pods()
        assert (pod.name, pod.grants[0].cores, pod.grants[0].memory) == ("web", 30, 4 * GIB)
        assert pod.pids == (self.container.process.pid,)
        assert container_notes.read(pod) is not None
        node.ask({"op": "pod.set", "name": "web", "cores": 100})  # nothing else holds a part of the card

    def close(self) -> None:
        self.container.end()


class Second(Start):
    """The second container of a claim."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.containers = [
            FakeContainer(names=("shop", "web", name), devices=("a-gpu",), env=["QGPU_GPU_0="]) for name in "12"
        ]
        assert in_process(partial(Node, directory), self._first) == DONE

    def _first(self, node: Node) -> None:
        limits = {"class": "offline", "cores": 60, "memory": 8 * GIB, "latency_target_ns": None}
        device = {"request": "gpu", "gpu": node.host.pgpus()[0].uuid, "share": ""} | limits
        claim = {"uid": "a", "namespace": "shop", "name": "c", "consumers": ["pod-1"], "devices": [device]}
        node.ask({"op": "grant.prepare"} | claim)
        node.ask(self.containers[0].message())

    def ask(self, node: Node) -> None:
        node.ask(self.containers[1].message())

    def check(self, node: Node) -> None:
        pods = {pod.name: pod.grants[0] for pod in node.host.pods()}
        assert pods.keys() == {"shop.web.1", "shop.web.2"}
        assert {node.requests.pods.users.owner_of(name) for name in pods} == {"namespace shop"}
        assert sum(grant.cores or 0 for grant in pods.values()) == 60
        assert sum(grant.memory or 0 for grant in pods.values()) <= 8 * GIB

    def close(self) -> None:
        for each in self.containers:
            each.end()


class Job(Start):
    """A task of a job, in the cgroup that Slurm made for it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.job = cgroup.mount() / f"qgpu-test-{os.getpid()}/job_7"
        (self.job / "step_0/slurm").mkdir(parents=True)
        self.at = "/" + str(self.job.relative_to(cgroup.mount()))
        self.task = subprocess.Popen(["sleep", "600"])
        (self.job / "step_0/slurm/cgroup.procs").write_text(str(self.task.pid))

    def ask(self, node: Node) -> None:
        node.ask({"op": "slurm.bind", "job": 7, "uid": 1234, "gpus": "0", "shards": "30"}, self.task.pid)

    def check(self, node: Node) -> None:
        (pod,) = node.host.pods()
        assert (pod.name, pod.cgroup, pod.grants[0].cores) == ("slurm-7", self.at, 30)
        assert slurm_steps.places(self.at) == [f"{self.at}/step_0"]
        assert node.requests.pods.users.owner_of(pod.name) == "user 1234"

    def close(self) -> None:
        self.task.kill()
        self.task.wait()
        for directory, _, _ in os.walk(self.job.parent, topdown=False):
            os.rmdir(directory)


def is_judged(file: str) -> bool:
    """Tell whether the daemon is killed in the lines of a file."""
    return file.startswith(OURS) and not any(each in file for each in ELSEWHERE)


@contextmanager
def started(kind: type[Start], directory: Path) -> Iterator[Start]:
    made = kind(directory)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("kind", [Plain, Second, Job])
def test_who_asks_again_after_a_kill_has_all(tmp_path: Path, kind: type[Start]) -> None:
    for lines in itertools.count(0, STRIDE):
        directory = tmp_path / str(lines)
        directory.mkdir()
        with started(kind, directory) as start:
            killed = in_process(partial(Node, directory), killed_after(lines, start.ask, is_judged))
            assert killed in (KILLED, DONE)

            def again(node: Node, start: Start = start) -> None:
                node.requests.reap()
                start.ask(node)
                start.check(node)

            assert in_process(partial(Node, directory), again) == DONE, f"killed after {lines} lines"
        if killed == DONE:
            break
