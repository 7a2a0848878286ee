"""Claims that several pods share through MPS, between a kubelet, an API server and a real qgpud on the simulator."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from qgpu.ipc.control_socket import Client
from tests.groups import stand_in
from tests.k8s.container import Container
from tests.k8s.group_node import GroupWorld, GuardedGroupWorld
from tests.k8s.world import GI, parameters, result

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def running() -> Iterator[GroupWorld]:
    made = GroupWorld("--resync", "0.2").start()
    yield made
    made.close()


@pytest.fixture
def world(running: GroupWorld) -> Iterator[GroupWorld]:
    """A node on which everything runs and nothing is claimed, before and after."""
    for part in running.parts:
        if not running.runs(part):
            running.start_part(part)
    running.eventually(running.api.slice)
    yield running
    for kind in ("resourceclaims", "pods"):
        for each in running.api.of(kind):
            running.api.delete(kind, each["metadata"]["namespace"], each["metadata"]["name"])
    running.kubelet.checkpoint.clear()
    for part in running.parts:
        if not running.runs(part):
            running.start_part(part)
    running.eventually(lambda: not running.grants() and not running.groups())


class Shared:
    """A prepared claim with a group, and two pods that use it."""

    def __init__(self, world: GroupWorld, **consumed: str) -> None:
        self.world = world
        self.claim = world.group_claim("pod-a", "pod-b", **{"memory": "20Gi", "cores": "40"} | consumed)
        self.uid = self.claim["metadata"]["uid"]
        self.group = f"claim-{self.uid}"
        self.containers: list[Container] = []
        assert world.kubelet.prepare(self.claim, "pod-a") == ""

    def start(self, pod: str) -> Container:
        """Start a container of a pod."""
        made = Container(self.world, pod, self.world.kubelet.names(self.uid))
        self.containers.append(made)
        return made

    def end(self) -> None:
        """End the containers."""
        for each in self.containers:
            each.kill()
        self.containers.clear()


@pytest.fixture
def shared(world: GroupWorld) -> Iterator[Shared]:
    made = Shared(world)
    yield made
    made.end()


def test_pods_of_one_claim_are_members_of_one_group(world: GroupWorld, shared: Shared) -> None:
    for pod in ("pod-a", "pod-b"):
        assert shared.start(pod).bind() == ""
    assert world.daemon is not None
    (pod,) = world.daemon.json("pod", "list")["pods"]

    assert pod["name"] == shared.group
    assert (pod["namespace"], pod["claim"]) == ("team", shared.claim["metadata"]["name"])
    assert [(each["cores"], each["memory"]) for each in pod["grants"]] == [(40, 20 * GI)]
    assert len(world.members(shared.group)) == 2


def test_group_is_counted_once(world: GroupWorld, shared: Shared) -> None:
    other = world.claim(result(0, cores="60", memory="1Gi"), pods=("q",))
    one_more = world.claim(result(0, cores="1", memory="1Gi"), pods=("r",))

    assert shared.start("pod-a").bind() == ""
    assert world.kubelet.prepare(other, "q") == ""
    assert "0 % is left" in world.kubelet.prepare(one_more, "r")


def test_cdi_device_makes_a_client_of_the_groups_mps(world: GroupWorld, shared: Shared) -> None:
    content = json.loads((world.cdi / f"qgpu-claim-{shared.uid}.json").read_text())
    edits = content["devices"][0]["containerEdits"]
    directory = world.runtime_dir / "groups" / shared.group

    assert f"CUDA_MPS_PIPE_DIRECTORY={directory}/pipe" in edits["env"]
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50" in edits["env"]
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M" in edits["env"]
    assert {each["containerPath"]: each["hostPath"] for each in edits["mounts"]} == {
        f"{directory}/pipe": f"{directory}/pipe",
        "/dev/shm": f"{directory}/shm",
    }
    assert "ro" in edits["mounts"][0]["options"]
    assert all(os.path.isdir(each["hostPath"]) for each in edits["mounts"])
    assert not list(world.cdi.glob("qgpu-group-*"))


def test_pod_that_the_claim_does_not_know_is_no_member(world: GroupWorld, shared: Shared) -> None:
    assert "is not reserved for its Kubernetes pod" in shared.start("stranger").bind(may_be_refused=True)
    assert world.members(shared.group) == []


def test_claim_with_members_is_not_given_up(world: GroupWorld, shared: Shared) -> None:
    assert shared.start("pod-a").bind() == ""
    assert "still run; it stays prepared" in world.kubelet.unprepare(shared.uid)
    shared.end()

    assert world.kubelet.unprepare(shared.uid) == ""
    assert not world.groups()


def test_unprepared_claim_leaves_nothing(world: GroupWorld, shared: Shared) -> None:
    assert world.keepers().keys() == {shared.group}
    assert world.kubelet.unprepare(shared.uid) == ""

    assert (world.groups(), world.grants(), world.keepers()) == (set(), {}, {})


def test_pod_that_comes_later_is_a_member_too(world: GroupWorld, shared: Shared) -> None:
    world.pod("pod-c", shared.claim["metadata"]["name"])
    reserved = [*shared.claim["status"]["reservedFor"], {"resource": "pods", "name": "pod-c", "uid": "pod-c"}]
    status = shared.claim["status"] | {"reservedFor": reserved}
    world.api.put("resourceclaims", "team", shared.claim["metadata"]["name"], shared.claim | {"status": status})
    world.eventually(lambda: "pod-c" in world.grants()[shared.uid]["consumers"])

    assert shared.start("pod-c").bind() == ""
    assert len(world.members(shared.group)) == 1


def test_members_outlive_the_keeper_and_the_supervisor(world: GroupWorld, shared: Shared) -> None:
    assert shared.start("pod-a").bind() == ""
    before = world.keepers()
    world.kill_supervisor()
    world.kill_keepers()
    world.start_supervisor()
    world.eventually(lambda: world.keepers().keys() == before.keys() and world.keepers() != before)
    assert shared.start("pod-b").bind() == ""

    assert len(world.members(shared.group)) == 2


def test_members_outlive_the_daemon_and_the_driver(world: GroupWorld, shared: Shared) -> None:
    assert shared.start("pod-a").bind() == ""
    world.kill_driver()
    world.kill_daemon()
    world.start_daemon()
    world.start_driver()
    assert shared.start("pod-b").bind() == ""

    assert len(world.members(shared.group)) == 2
    assert world.grants()[shared.uid]["pods"] == [shared.group]


def test_without_a_supervisor_the_claim_waits_with_a_reason(world: GroupWorld) -> None:
    world.kill_supervisor()
    claim = world.group_claim("pod-a")
    assert "is qgpu-groups.service enabled on this node?" in world.kubelet.prepare(claim, "pod-a")
    world.start_supervisor()

    assert world.kubelet.prepare(claim, "pod-a") == ""


def test_claim_of_two_devices_makes_no_group(world: GroupWorld) -> None:
    configured = (parameters("FromClaim", sharing="MPS"),)
    claim = world.claim(result(0, share="a"), result(1, share="b"), pods=("p",), configurations=configured)

    assert "a group has one device, not 2" in world.kubelet.prepare(claim, "p")
    assert not world.grants()


def test_limits_of_a_claims_group_are_its_claims(world: GroupWorld, shared: Shared) -> None:
    assert world.daemon is not None
    for command in (
        ("group", "set", shared.group, "--cores", "90"),
        ("pod", "set", shared.group, "--cores", "90"),
        ("group", "remove", shared.group, "--force"),
        ("run", "--group", shared.group, "--", "true"),
        ("run", "--name", shared.group, "--", "true"),
    ):
        refused = world.daemon.ctl(*command)
        assert (refused.returncode, "claim" in refused.stderr, len(refused.stderr.splitlines())) == (21, True, 1)
    assert world.keepers().keys() == {shared.group}


def test_members_behind_a_guardian_are_held_to_the_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = stand_in.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    world = GuardedGroupWorld("--resync", "0.2")
    try:
        world.start()
        world.eventually(world.api.slice)
        shared = Shared(world, memory="1Gi")
        members = [world.container(pod, world.kubelet.names(shared.uid)) for pod in ("pod-a", "pod-b")]
        assert None not in members
        for each in members:
            assert (each.bind(), each.exceeds(GI)) == ("", "")
        with Client(world.runtime_dir) as client:
            (pod,) = client.call("pod.list")["pods"]
        world.kill_guardian()
        for each in members:
            assert each.exceeds(GI) == ""
            each.kill()

        assert (pod["name"], len(pod["pids"]), pod["grants"][0]["memory"]) == (shared.group, 4, GI)
        assert world.kubelet.unprepare(shared.uid) == ""
        assert world.groups() == set()
    finally:
        world.close()
