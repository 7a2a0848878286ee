"""The groups of claims: qgpud, the supervisor and its keepers, with stand-ins for NVIDIA's MPS."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qgpu.errors import AlreadyRunningError, QgpuError
from qgpu.groups.group_files import GroupFiles
from qgpu.groups.mps_server import is_mps
from qgpu.groups.supervisor import Supervisor
from qgpu.ipc.control_socket import Client
from qgpu.linux import proc
from qgpu.linux.proc import start_time
from qgpu.linux.shutdown import Shutdown
from tests.cli.programs import Daemon
from tests.groups import stand_in

pytestmark = pytest.mark.root

GROUP = "claim-u"
MOMENTS = int(os.environ.get("QGPU_MOMENTS", "4"))


class Node:
    """A daemon with a prepared claim that asks for MPS, and the supervisor in a thread."""

    def __init__(self, directory: Path) -> None:
        self.runtime_dir, self.state = directory / "run", directory / "state"
        self.files = GroupFiles(self.runtime_dir, GROUP)
        self.start_daemon()
        self.start_supervisor()

    def start_daemon(self) -> None:
        self.daemon = Daemon(self.runtime_dir, "--plane", "sim", "--state-dir", str(self.state))

    def start_supervisor(self) -> None:
        self.stop = Shutdown()
        supervisor = Supervisor(self.runtime_dir, stand_in.KEEPER)
        self.thread = threading.Thread(target=supervisor.run, args=(self.stop,))
        self.thread.start()

    def stop_supervisor(self) -> None:
        self.stop.set()
        self.thread.join()

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        with Client(self.runtime_dir, 60) as client:
            return client.call(op, **arguments)

    def prepare(self, **limits: Any) -> None:
        """Prepare the claim."""
        (card,) = self.ask("gpu.list")["gpus"]
        device = {"request": "gpu", "gpu": card["uuid"], "share": "", "class": "offline", "latency_target_ns": None}
        part = {"sm": 25, "memory": None}
        grant = {"cores": 60, "memory": None} | limits
        self.ask(
            "grant.prepare", uid="u", namespace="team", name="llm", consumers=["p"], part=part, devices=[device | grant]
        )

    def drop(self) -> None:
        """Give the claim up."""
        self.ask("grant.drop", uid="u")

    def mps(self) -> list[int]:
        """The group's MPS processes."""
        try:
            pods = self.ask("pod.list")["pods"]
        except QgpuError:
            return []
        return [pid for pod in pods if pod["name"] == GROUP for pid in pod["pids"] if is_mps(pid)]

    def await_whole(self, *gone: int) -> list[int]:
        """Wait until the group takes members, without these processes; return its MPS processes."""
        while not (self.files.begun and self.files.server.answers and len(now := self.mps()) == 2) or {*gone} & {*now}:
            assert self.thread.is_alive()
            time.sleep(0.05)
        return now

    def close(self) -> None:
        self.stop_supervisor()
        if (keeper := self.files.keeper()) is not None:
            os.kill(keeper, signal.SIGTERM)
            while self.files.keeper() is not None:
                time.sleep(0.05)
        self.daemon.stop(signal.SIGKILL)


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Path:
    program = stand_in.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


@pytest.fixture
def node(tmp_path, installed) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def test_prepared_claims_group_has_mps_with_the_claims_grant(node: Node) -> None:
    node.prepare(memory=4 << 30)
    (pod,) = node.ask("pod.list")["pods"]

    assert len(node.mps()) == 2
    assert (pod["name"], pod["grants"][0]["cores"], pod["grants"][0]["memory"]) == (GROUP, 60, 4 << 30)
    assert node.files.part.sm == 25


def test_servers_shared_memory_is_the_groups_alone(node: Node) -> None:
    node.prepare()

    assert (node.files.server.memory / f"of-{GROUP}").exists()
    assert not Path(f"/dev/shm/of-{GROUP}").exists()
    assert os.path.ismount(node.files.server.memory)
    assert os.statvfs(node.files.server.memory).f_files <= (64 << 20) // 4096, "an empty file takes memory, too"


def test_other_users_reach_nothing_of_a_claims_group(node: Node) -> None:
    node.prepare()

    assert not node.files.directory.stat().st_mode & 0o077
    assert node.daemon.json("group", "list")["groups"][0]["name"] == GROUP


def test_processes_of_other_pods_are_not_looked_at(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod decides how many there are; a claim whose group has members is not waited for, either."""
    looked_at: list[int] = []
    monkeypatch.setattr(proc, "name", lambda pid: looked_at.append(pid) or "")
    node.prepare()
    pod = node.daemon.start("run", "--name", "web", "--", "sh", "-c", "echo $$; exec sleep 600")
    assert pod.stdout is not None
    pid = int(pod.stdout.readline())
    rounds = Supervisor(node.runtime_dir, stand_in.KEEPER)
    rounds.compare()
    os.kill(pid, signal.SIGKILL)
    pod.communicate(timeout=60)

    assert pid not in looked_at


def test_dropped_claim_leaves_no_process_mount_or_file(node: Node) -> None:
    node.prepare()
    pids = node.await_whole()
    node.drop()

    assert not any(map(start_time, pids))
    assert (node.ask("pod.list")["pods"], node.ask("grant.list")["grants"]) == ([], [])
    assert not node.files.directory.exists()


def test_without_mps_the_claim_is_not_prepared(node: Node, installed: Path, monkeypatch) -> None:
    installed.write_text("#!/bin/false\n")
    with pytest.raises(QgpuError, match="sharing MPS: group claim-u: nvidia-cuda-mps-control does not start"):
        node.prepare()

    assert node.ask("pod.list")["pods"] == []
    assert node.ask("grant.list")["grants"], "its part stays taken until it is dropped"
    node.drop()


def test_second_supervisor_is_refused(node: Node) -> None:
    node.prepare()
    with pytest.raises(AlreadyRunningError, match="are served there already"):
        Supervisor(node.runtime_dir).run(Shutdown())


def test_nobody_else_can_hold_the_lock(tmp_path: Path) -> None:
    path, stop = tmp_path / "groups.lock", Shutdown()
    path.touch(0o644)  # of an earlier version
    stop.set()
    Supervisor(tmp_path).run(stop)

    assert not path.stat().st_mode & 0o077


def test_keeper_of_a_lost_claim_ends_when_it_has_no_members(node: Node) -> None:
    node.prepare()
    node.await_whole()
    node.daemon.stop(signal.SIGKILL)
    (node.state / "claims" / "u.json").unlink()
    node.start_daemon()
    while node.files.directory.exists() or node.ask("pod.list")["pods"]:
        time.sleep(0.05)

    assert node.files.keeper() is None


def test_group_comes_back_whoever_is_killed_when(node: Node) -> None:
    """Kill MPS, keeper, supervisor and daemon at random moments; the claim stays, and nothing is left in the end."""
    chance, seen = random.Random(51), set[int]()
    node.prepare()
    for _ in range(MOMENTS):
        before = node.await_whole()
        seen |= {*before, keeper := node.files.keeper() or 0}
        time.sleep(chance.random())
        what = chance.choice(["mps", "keeper", "supervisor and keeper", "daemon"])
        if "supervisor" in what:
            node.stop_supervisor()
        for pid in before if what == "mps" else [keeper] if "keeper" in what else []:
            os.kill(pid, signal.SIGKILL)
        if "supervisor" in what:
            node.start_supervisor()
        if what == "daemon":
            node.daemon.stop(signal.SIGKILL)
            node.start_daemon()
        node.await_whole(*(before if what != "daemon" else ()))
        assert [grant["uid"] for grant in node.ask("grant.list")["grants"]] == ["u"]
    node.drop()

    while any(map(start_time, seen)):  # the keeper ends last
        time.sleep(0.05)
    assert not node.files.directory.exists()
