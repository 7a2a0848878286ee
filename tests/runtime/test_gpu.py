"""Containers on a real GPU without the module: bound by the hook, supervised through the agent."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.programs import Daemon
from tests.runtime.plain import Plain

pytestmark = pytest.mark.gpu

LOAD = (sys.executable, "-m", "qgpu.load.main", "--kernel", "1ms", "--duration", "0s")
ALLOC = (sys.executable, "-m", "tests.runtime.alloc")
OUT_OF_MEMORY = 2
SETTLE_S, MEASURE_S = 3, 6


Start = Callable[[], Daemon]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a daemon, or its successor."""
    made: list[Daemon] = []

    def start() -> Daemon:
        (tmp_path / "qgpu.toml").write_text(f'[containers]\ncdi = "{tmp_path}/cdi"\n')
        made.append(Daemon(tmp_path / "run", "--plane", "seccomp", "--config", str(tmp_path / "qgpu.toml")))
        line = made[-1].first_line
        while '"ready"' not in line:
            assert line, "the daemon did not start"
            line = made[-1].line()
        return made[-1]

    yield start
    for each in made:
        if each.process.poll() is None:
            each.stop()


@pytest.fixture
def daemon(start: Start) -> Daemon:
    return start()


@pytest.fixture
def container(daemon: Daemon, tmp_path: Path) -> Iterator[Callable[..., Plain]]:
    made: list[Plain] = []

    def make(name: str, **limits: str) -> Plain:
        said = {f"qgpu.io/{limit}": value for limit, value in limits.items()}
        made.append(Plain(name, tmp_path, daemon.runtime_dir, said))
        return made[-1]

    yield make
    for each in made:
        each.end()


def pods(daemon):
    return {pod["name"]: pod for pod in daemon.json("pod", "list")["pods"]}


def until(condition):
    end = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.1)


def used(daemon):
    return {name: pod["usage"][0]["used_ns"] for name, pod in pods(daemon).items()}


def ratio(daemon):
    until(lambda: len(pods(daemon)) == 2 and all(pod["usage"][0]["busy"] for pod in pods(daemon).values()))
    time.sleep(SETTLE_S)
    before = used(daemon)
    time.sleep(MEASURE_S)
    after = used(daemon)
    found = (after["two"] - before["two"]) / (after["one"] - before["one"])
    print(f"\nratio of two containers at 60 and 30 per cent: {found:.3f}")
    return found


def test_two_containers_share_two_to_one_even_with_exec(daemon, container):
    two, one = container("two", cores="60"), container("one", cores="30")
    assert two.start(*LOAD) == ""
    assert one.start("/bin/sleep", "600") == ""
    one.exec(*LOAD)

    assert ratio(daemon) == pytest.approx(2, rel=0.05)


def test_exec_into_a_container_stays_under_its_memory_limit(daemon, container):
    web = container("web", memory="4GiB")
    assert web.start("/bin/sleep", "600") == ""

    assert [web.exec(*ALLOC, size).communicate()[0].strip() for size in ("8192", "1024")] == [str(OUT_OF_MEMORY), "0"]


def test_containers_survive_killed_daemon_and_successor_adopts(daemon, start, container):
    two, one = container("two", cores="60"), container("one", cores="30")
    assert (two.start(*LOAD), one.start(*LOAD)) == ("", "")
    until(lambda: all(pod["usage"][0]["busy"] for pod in pods(daemon).values()))
    daemon.stop(signal.SIGKILL)
    late = container("late").start("/bin/sleep", "600")
    successor = start()

    assert "qgpud does not answer" in late
    assert two.processes[0].poll() is None
    assert ratio(successor) == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(
    ("section", "says"),
    [({}, "qgpuctl cdi profile"), ({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": []}, "qgpuctl cdi profile")],
)
def test_container_whose_calls_bypass_us_does_not_start(daemon, container, section, says):
    web = container("web")
    web.config["linux"]["seccomp"] = section

    assert says in web.start("/bin/sleep", "600")
    assert pods(daemon) == {}


def test_cdi_file_has_card_node_and_driver_libraries(daemon, tmp_path):
    made = json.loads((tmp_path / "cdi" / "qgpu.json").read_text())
    mounts = {mount["containerPath"]: mount["hostPath"] for mount in made["containerEdits"]["mounts"]}
    nodes = [node["path"] for node in made["containerEdits"]["deviceNodes"]]
    print(f"\n{len(mounts)} mounts, nodes {nodes}")

    assert made["devices"][0]["containerEdits"]["deviceNodes"] == [{"path": "/dev/nvidia0"}]
    assert {"/dev/nvidiactl", "/dev/nvidia-uvm"} <= set(nodes)
    assert all(Path(host).exists() for host in mounts.values())
    assert {"/usr/lib64/libcuda.so.1", "/usr/lib64/libnvidia-ml.so.1"} <= set(mounts)
