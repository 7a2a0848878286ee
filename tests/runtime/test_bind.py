"""A real container is a pod before its process starts, or does not start: runc and the daemon, on the simulator."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qgpu.linux import cgroup
from qgpu.paths import socket_path
from tests.cli import programs
from tests.cli.programs import Daemon
from tests.runtime import oci
from tests.runtime.oci import Container

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with programs.daemon(tmp_path_factory.mktemp("qgpu") / "run", "--sim-gpus", "2") as running:
        yield running


Make = Callable[..., Container]


@pytest.fixture(params=oci.RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def container(daemon: Daemon, tmp_path: Path, runtime: str) -> Iterator[Make]:
    """Make containers of pGPU 0; they end with the test."""
    made = []

    def make(annotations: dict[str, str] | None = None, **variables: str) -> Container:
        made.append(Container(runtime, tmp_path, daemon.runtime_dir, "sleep", "600"))
        return made[-1].ask(annotations or {}, **({"QGPU_GPU_0": ""} | variables))

    yield make
    for each in made:
        each.end()
    until(lambda: not pods(daemon))


def pods(daemon):
    return {pod["name"]: pod for pod in daemon.json("pod", "list")["pods"]}


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


def test_container_is_a_pod_with_grant_from_its_first_process(daemon, container):
    web = container(
        {"qgpu.io/name": "web", "qgpu.io/cores": "40", "qgpu.io/memory": "16GiB", "qgpu.io/class": "online"}
    )
    started = web.start()

    assert started.returncode == 0, started.stdout
    found = pods(daemon)["web"]
    (grant,) = found["grants"]
    assert (grant["gpu"], grant["cores"], grant["memory"], grant["class"]) == (0, 40, 16 << 30, "online")
    assert found["pids"] == [web.state()["pid"]]


def test_exec_into_a_container_stays_in_its_pod(daemon, container):
    web = container({"qgpu.io/name": "web"})
    web.start()
    web.do("exec", "-d", web.id, "sleep", "601")

    until(lambda: len(pods(daemon)["web"]["pids"]) == 2)


def test_a_container_has_every_pgpu_that_its_devices_name(daemon, container):
    container({"qgpu.io/name": "web"}, QGPU_GPU_1="").start()

    assert [grant["gpu"] for grant in pods(daemon)["web"]["grants"]] == [0, 1]


def test_a_container_that_is_gone_is_no_pod(daemon, container):
    web = container({"qgpu.io/name": "web"})
    web.start()
    web.end()

    until(lambda: "web" not in pods(daemon))


def test_restarted_container_replaces_its_last_run(daemon, container):
    web = container({"qgpu.io/name": "web", "qgpu.io/cores": "70"})
    for _ in range(3):
        web.end()
        started = web.start()
        assert started.returncode == 0, started.stdout
    assert pods(daemon)["web"]["pids"] == [web.state()["pid"]]


def test_without_a_name_of_its_own_it_goes_by_its_id(daemon, container):
    web = container()
    web.start()

    assert list(pods(daemon)) == [web.id[:12]]


def test_kubernetes_names_name_the_pod(daemon, container):
    keys = ("sandbox-namespace", "sandbox-name", "container-name")
    said = dict(zip((f"io.kubernetes.cri.{key}" for key in keys), ("shop", "cart-1", "model"), strict=True))
    container(said).start()

    assert list(pods(daemon)) == ["shop.cart-1.model"]


@pytest.mark.parametrize(
    ("annotations", "says"),
    [
        ({"qgpu.io/cores": "0"}, "a quota is 1 to 100 per cent"),
        ({"qgpu.io/memory": "900GiB"}, "does not fit"),
        ({"qgpu.io/cores": "10", "nvidia.com/gpucores": "20"}, "contradict each other"),
        ({"qgpu.io/name": "../x"}, "pod name"),
    ],
)
def test_container_with_unenforceable_limit_does_not_start(daemon, container, annotations, says):
    web = container(annotations)
    started = web.start()

    assert started.returncode != 0
    assert says in started.stdout
    assert "qgpu: " in started.stdout
    assert pods(daemon) == {}
    assert web.do("state", web.id).returncode != 0


def test_what_is_granted_already_is_not_granted_again(daemon, container):
    first, second = container({"qgpu.io/cores": "70"}), container({"qgpu.io/cores": "40"})
    first.start()
    started = second.start()

    assert started.returncode != 0
    assert "30 % is left to grant" in started.stdout


def test_a_container_that_may_open_anything_gets_no_memory_limit(daemon, container):
    wide, later = container({"qgpu.io/memory": "1GiB"}), container({"qgpu.io/name": "later"})
    for each in (wide, later):
        each.config["linux"]["resources"] = {"devices": [{"allow": True, "access": "rwm"}]}
    refused, started = wide.start(), later.start()

    assert refused.returncode != 0
    assert "makes video memory that no limit covers" in refused.stdout
    assert started.returncode == 0, started.stdout
    assert "its container reaches /dev/dri" in daemon.ctl("pod", "set", "later", "--memory", "1GiB").stderr
    assert daemon.ctl("pod", "set", "later", "--cores", "10").returncode == 0


@pytest.mark.parametrize("said", ["QGPU_CLASS=online", "QGPU_CORES=100", "QGPU_NAME=web"])
def test_what_an_image_may_not_ask_for_starts_no_container(daemon, container, said):
    name, _, value = said.partition("=")
    started = container(**{name: value}).start()

    assert started.returncode != 0
    assert f"environment {name}" in started.stdout


@pytest.mark.parametrize("where", ["inner", "../victim"])
def test_container_whose_image_chooses_a_cgroup_does_not_start(daemon, container, where):
    """podman passes on an image's annotations, and crun moves the container where this one says."""
    web = container({"run.oci.delegate-cgroup": where})
    started = web.start()

    assert started.returncode != 0
    assert "annotation run.oci.delegate-cgroup may give it another cgroup" in started.stdout
    assert pods(daemon) == {}


#: Connects as often as it can, and stays.
CROWD = """
import os, socket, sys
open(sys.argv[2], "w").write(str(os.getpid()))
held = []
for _ in range(600):
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].connect(sys.argv[1])
print("there", flush=True)
sys.stdin.read()
"""


def test_container_that_sees_the_hosts_cgroups_does_not_start(daemon, container):
    """Root in it moves a child elsewhere by an open directory, although the mount is read-only."""
    web, tree = container({"qgpu.io/name": "web"}), str(cgroup.mount())
    web.config["linux"]["namespaces"] = [each for each in web.config["linux"]["namespaces"] if each["type"] != "cgroup"]
    web.config["mounts"].append({"type": "bind", "source": tree, "destination": "/tmp", "options": ["rbind", "ro"]})
    started = web.start()

    assert started.returncode != 0
    assert "cgroups of the host are mounted in it" in started.stdout
    assert "web" not in pods(daemon)


def test_root_in_a_container_keeps_neither_root_nor_the_hook_out(daemon, container):
    web = container({"qgpu.io/name": "web"})
    web.start()
    inside = cgroup.mount() / pods(daemon)["web"]["cgroup"].lstrip("/") / "cgroup.procs"
    command = [sys.executable, "-c", CROWD, str(socket_path(daemon.runtime_dir)), str(inside)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as crowd:
        assert crowd.stdout is not None
        assert crowd.stdout.readline() == b"there\n"
        assert "web" in pods(daemon)
        started = container({"qgpu.io/name": "beside"}).start()
        crowd.kill()

    assert started.returncode == 0, started.stdout


def test_without_daemon_no_container_starts_and_others_run_on(tmp_path, runtime):
    with programs.daemon(tmp_path / "run") as daemon, contextlib.ExitStack() as ends:
        there, late = (Container(runtime, tmp_path, daemon.runtime_dir, "sleep", "600") for _ in range(2))
        for each in (there, late):
            each.ask({}, QGPU_GPU_0="")
            ends.callback(each.end)
        there.start()
        daemon.stop(signal.SIGKILL)
        started = late.start()

        assert started.returncode != 0
        assert "qgpud does not answer" in started.stdout
        os.kill(there.state()["pid"], 0)
        assert there.exec("true").returncode == 0
