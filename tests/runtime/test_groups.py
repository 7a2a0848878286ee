"""Real containers in a share group: a runtime, our hook, the group's CDI file and the daemon, on the simulator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qgpu.ipc.control_socket import Client
from qgpu.linux import cgroup
from tests.cli.programs import Daemon
from tests.runtime import oci
from tests.runtime.oci import Container
from tests.runtime.test_bind import until

pytestmark = pytest.mark.root


class Node:
    """A daemon with two cards, the group "llm" on the first of them, and containers."""

    def __init__(self, directory: Path, runtime: str) -> None:
        self.directory, self.runtime, self.cdi = directory, runtime, directory / "cdi"
        (directory / "qgpu.toml").write_text(f'[containers]\ncdi = "{self.cdi}"\n')
        options = ("--plane", "sim", "--sim-gpus", "2", "--config", str(directory / "qgpu.toml"))
        self.daemon = Daemon(directory / "run", *options)
        self.containers: list[Container] = []
        self.create()

    def create(self) -> None:
        """Make the group."""
        made = self.daemon.ctl("group", "create", "llm", "--cores", "60", "--memory", "40GiB", "--sm", "50")
        assert made.returncode == 0, made.stderr

    def file(self) -> dict[str, Any]:
        """Return the group's CDI file."""
        found: dict[str, Any] = json.loads((self.cdi / "qgpu-group-llm.json").read_text())
        return found

    def container(self, *, member: bool = True) -> Container:
        """Make a container, with the group's device or without."""
        made = Container(self.runtime, self.directory, self.daemon.runtime_dir, "sleep", "600")
        self.containers.append(made)
        if not member:
            return made
        edits = self.file()["devices"][0]["containerEdits"]
        for mount in edits["mounts"]:
            made.config["mounts"].append(
                {
                    "destination": mount["containerPath"],
                    "source": mount["hostPath"],
                    "type": "bind",
                    "options": mount["options"],
                }
            )
        return made.give(self.file(), "llm")

    def pods(self) -> dict[str, dict[str, Any]]:
        """Return the pods by name."""
        return {pod["name"]: pod for pod in self.daemon.json("pod", "list")["pods"]}

    def close(self) -> None:
        """End everything."""
        for each in self.containers:
            each.end()
        self.daemon.ctl("group", "remove", "llm", "--force")
        self.daemon.stop()


@pytest.fixture(params=oci.RUNTIMES)
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path, str(request.param))
    yield made
    made.close()


def test_members_count_to_the_groups_pod_under_its_grant(node: Node) -> None:
    members = [node.container() for _ in range(2)]
    for each in members:
        started = each.start()
        assert started.returncode == 0, started.stdout

    (pod,) = node.pods().values()
    assert (pod["name"], pod["grants"][0]["cores"]) == ("llm", 60)
    assert {each.state()["pid"] for each in members} <= set(pod["pids"])


def test_member_finds_the_socket_directory_and_its_part(node: Node) -> None:
    pipe = node.directory / "run" / "groups" / "llm" / "pipe"
    web = node.container()
    web.start()
    (pipe / "control").touch()  # as a control daemon that starts later
    environment = web.exec("cat", "/proc/1/environ").stdout

    assert web.exec("cat", str(pipe / "control")).returncode == 0
    assert f"CUDA_MPS_PIPE_DIRECTORY={pipe}\0" in environment
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50\0" in environment
    assert web.exec("sh", "-c", f"echo > {pipe}/x").returncode != 0


def test_exec_into_a_member_stays_in_the_group(node: Node) -> None:
    web = node.container()
    web.start()
    web.do("exec", "-d", web.id, "sleep", "601")

    until(lambda: len(node.pods()["llm"]["pids"]) == 2)


def test_ended_member_counts_no_longer_and_the_group_stays(node: Node) -> None:
    web = node.container()
    web.start()
    web.end()

    until(lambda: not node.pods()["llm"]["pids"])
    assert node.daemon.json("group", "show", "llm")["group"]["members"] == []


def test_environment_and_annotations_make_no_member(node: Node) -> None:
    web = node.container(member=False).ask(QGPU_GPU_0="", CUDA_MPS_PIPE_DIRECTORY="/x", QGPU_GROUP="llm")
    web.start()
    assert sorted(node.pods()) == sorted(["llm", web.id[:12]])

    annotated = node.container(member=False).ask({"qgpu.io/group": "llm"}, QGPU_GPU_0="")
    started = annotated.start()
    assert (started.returncode != 0, "annotation qgpu.io/group" in started.stdout) == (True, True)


def test_limits_of_a_members_own_change_nothing(node: Node) -> None:
    node.container().ask({"qgpu.io/cores": "99", "qgpu.io/name": "root"}, QGPU_MEMORY="100GiB").start()

    (pod,) = node.pods().values()
    assert (pod["grants"][0]["cores"], pod["grants"][0]["memory"]) == (60, 40 << 30)


def test_member_with_another_card_does_not_start(node: Node) -> None:
    started = node.container().ask(QGPU_GPU_1="").start()

    assert "it has pGPU 1, which is not group llm's" in started.stdout
    assert node.pods()["llm"]["pids"] == []


def test_device_of_a_group_that_is_gone_makes_no_member(node: Node) -> None:
    late = node.container()
    late.config["mounts"].pop()  # whose source goes with the group
    node.daemon.ctl("group", "remove", "llm")
    assert not (node.cdi / "qgpu-group-llm.json").exists()
    with Client(node.daemon.runtime_dir) as other:
        other.call("pod.create", name="llm", grants={"0": {"class": "offline"}})
        started = late.start()

        assert "group llm: there is no such group" in started.stdout
        assert node.pods()["llm"]["pids"] == []


def test_member_that_starts_anew_without_the_device_is_a_pod(node: Node) -> None:
    web = node.container()
    web.start()
    web.end()
    web.config["hooks"]["createRuntime"][0]["args"].pop()
    web.start()

    assert node.pods()["llm"]["pids"] == []
    assert web.id[:12] in node.pods()


def test_member_of_two_groups_does_not_start(node: Node) -> None:
    web = node.container()
    web.config["hooks"]["createRuntime"][0]["args"].append("qgpu.io/group=other")
    assert "a member of a group has that device alone" in web.start().stdout


def test_group_list_and_show_name_container_members(node: Node) -> None:
    web = node.container()
    web.start()
    (member,) = node.daemon.json("group", "show", "llm")["group"]["members"]

    assert (member["pid"], member["program"]) == (web.state()["pid"], "sleep")
    assert cgroup.is_of_container(member["cgroup"], web.id)
    assert "MEMBER" in node.daemon.ctl("group", "show", "llm").stdout


def test_part_that_was_set_is_that_of_later_members(node: Node) -> None:
    said = node.daemon.ctl("group", "set", "llm", "--sm", "25", "--member-memory", "8GiB", "--cores", "30").stdout
    environment = node.file()["devices"][0]["containerEdits"]["env"]

    assert "quota 60 % -> 30 %" in said
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25" in environment
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M" in environment
    assert node.pods()["llm"]["grants"][0]["cores"] == 30
