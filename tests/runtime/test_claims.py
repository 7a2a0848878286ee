"""Real containers of Kubernetes claims: a runtime, our hook, the CDI files and the daemon, on the simulator."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from qgpu.ipc.control_socket import Client
from qgpu.runtime import oci_hook
from qgpu.runtime.oci_container import GROUP_KIND, PREPARED_KIND
from tests.cli.programs import Daemon
from tests.runtime import oci
from tests.runtime.oci import Container
from tests.runtime.test_bind import until

pytestmark = pytest.mark.root

GIB = 1 << 30
CARDS = 2


class Node:
    """A daemon that can be killed and started again, with its claims and containers."""

    def __init__(self, directory: Path, runtime: str) -> None:
        self.directory, self.runtime, self.cdi = directory, runtime, directory / "cdi"
        (directory / "qgpu.toml").write_text(f'[containers]\ncdi = "{self.cdi}"\n')
        self.containers: list[Container] = []
        self.daemon = self.start()
        self.cards = [gpu["uuid"] for gpu in self.daemon.json("gpu", "list")["gpus"]]

    def start(self) -> Daemon:
        """Start the daemon."""
        options = ("--plane", "sim", "--sim-gpus", str(CARDS), "--config", str(self.directory / "qgpu.toml"))
        return Daemon(self.directory / "run", *options, "--state-dir", str(self.directory / "lib"))

    def kill(self) -> None:
        """Kill the daemon and start the next one."""
        self.daemon.stop(signal.SIGKILL)
        self.daemon = self.start()

    def close(self) -> None:
        """End everything."""
        for each in self.containers:
            each.end()
        self.daemon.stop()

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Make a request."""
        with Client(self.daemon.runtime_dir) as client:
            return client.call(op, **arguments)

    def prepare(self, uid: str, *devices: dict[str, Any]) -> Sequence[str]:
        """Prepare a claim for pod-1; return its devices' names."""
        given = [
            {"request": f"r{n}", "share": "", "gpu": self.cards[0], "class": "offline"} | device
            for n, device in enumerate(devices)
        ]
        answer = self.ask("grant.prepare", uid=uid, namespace="shop", name=uid, consumers=["pod-1"], devices=given)
        return [each["cdi"].removeprefix(f"{PREPARED_KIND}=") for each in answer["devices"]]

    def container(self, *claims: tuple[str, Sequence[str]], pod: str = "pod-1", **variables: str) -> Container:
        """Make a container of a Kubernetes pod, with devices of claims."""
        made = Container(self.runtime, self.directory, self.daemon.runtime_dir, "sleep", "600")
        self.containers.append(made)
        values = dict(zip(("namespace", "name", "uid"), ("shop", "web", pod), strict=True))
        said = {f"io.kubernetes.cri.sandbox-{key}": value for key, value in values.items()}
        made.ask(said | {"io.kubernetes.cri.container-name": f"c{len(self.containers)}"}, **variables)
        for uid, names in claims:
            made.give(json.loads((self.cdi / f"qgpu-claim-{uid}.json").read_text()), *names)
        return made

    def pods(self) -> dict[str, dict[str, Any]]:
        """Return the pods by name."""
        return {pod["name"]: pod for pod in self.daemon.json("pod", "list")["pods"]}


@pytest.fixture(params=oci.RUNTIMES)
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path, str(request.param))
    yield made
    made.close()


def test_the_hook_knows_how_devices_with_names_begin() -> None:
    assert (f"{PREPARED_KIND}=", f"{GROUP_KIND}=") == oci_hook._NAMED


def test_a_container_gets_what_its_claims_hold(node: Node) -> None:
    first = node.prepare("one", {"cores": 30, "memory": 4 * GIB}, {"cores": 5, "gpu": node.cards[1]})
    second = node.prepare("two", {"cores": 20, "memory": 2 * GIB})
    web = node.container(("one", first), ("two", second), QGPU_CORES="99", QGPU_MEMORY="100GiB")
    web.ask({"qgpu.io/cores": "99", "qgpu.io/class": "online", "qgpu.io/name": "root"})
    started = web.start()

    assert started.returncode == 0, started.stdout
    pod = node.pods()["shop.web.c1"]
    assert [(each["gpu"], each["class"], each["cores"], each["memory"]) for each in pod["grants"]] == [
        (0, "offline", 50, 6 * GIB),
        (1, "offline", 5, None),
    ]
    assert (pod["namespace"], pod["pod"], pod["container"], pod["claim"]) == ("shop", "web", "c1", "one,two")
    assert pod["pids"] == [web.state()["pid"]]
    assert {each["uid"]: each["pods"] for each in node.ask("grant.list")["grants"]} == {
        "one": ["shop.web.c1"],
        "two": ["shop.web.c1"],
    }


def test_a_restarted_container_has_its_claim_again(node: Node) -> None:
    names = node.prepare("one", {"cores": 90})
    web = node.container(("one", names))
    for _ in range(3):
        web.end()
        started = web.start()
        assert started.returncode == 0, started.stdout

    assert node.pods()["shop.web.c1"]["grants"][0]["cores"] == 90


def test_a_forged_marker_starts_no_container(node: Node) -> None:
    own, other = node.prepare("one", {"cores": 10}), node.prepare("two", {"cores": 80})
    started = node.container(("one", own), QGPU_CLAIM_x=other[0]).start()

    assert started.returncode != 0
    assert "its environment names the prepared device two-r0, which it was not given" in started.stdout
    assert node.pods() == {}


def test_another_pods_claim_starts_no_container(node: Node) -> None:
    names = node.prepare("one", {"cores": 10})
    started = node.container(("one", names), pod="pod-2").start()

    assert started.returncode != 0
    assert "claim shop/one is not reserved for its Kubernetes pod (pod-2)" in started.stdout


def test_a_claim_outlives_its_daemon(node: Node) -> None:
    names = node.prepare("one", {"cores": 30, "memory": 4 * GIB})
    node.kill()
    started = node.container(("one", names)).start()

    assert started.returncode == 0, started.stdout
    assert node.pods()["shop.web.c1"]["grants"][0]["memory"] == 4 * GIB


def test_a_claim_is_dropped_when_its_container_is_gone(node: Node) -> None:
    names = node.prepare("one", {"cores": 30})
    web = node.container(("one", names))
    web.start()
    refused = node.daemon.ctl("grant", "drop", "one")
    web.end()
    until(lambda: not node.pods())
    dropped = node.daemon.ctl("grant", "drop", "one")

    assert refused.returncode == 21
    assert "pod shop.web.c1 still uses it, so it stays prepared" in refused.stderr
    assert (dropped.returncode, dropped.stderr) == (0, "")
    assert [path.name for path in node.cdi.iterdir()] == ["qgpu.json"]


def test_grant_list_shows_what_claims_hold(node: Node) -> None:
    node.prepare("one", {"cores": 30, "memory": 4 * GIB, "class": "online", "latency_target_ns": 2_000_000})
    header, row = node.daemon.ctl("grant", "list").stdout.splitlines()

    assert header.split() == ["CLAIM", "UID", "REQUEST", "GPU", "CLASS", "TARGET", "QUOTA", "LIMIT", "PODS"]
    assert row.split() == ["shop/one", "one", "r0", node.cards[0], "online", *["2", "ms", "30", "%", "4", "GiB", "-"]]
