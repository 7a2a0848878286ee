"""Memory overcommit as an operator sees it: set, waited for, shown."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qgpu.cli.gpu import facts
from qgpu.errors import ExitCode
from qgpu.ipc.control_socket import Client
from tests.cli import programs
from tests.cli.programs import TIMEOUT_S, Daemon


def load(gib: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "qgpu.load.main", "--duration", "0s", "--memory", f"{gib}GiB", "--watch")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon whose card of 141 GiB is granted twice, with a metrics endpoint."""
    config = tmp_path / "qgpud.toml"
    config.write_text(f'[metrics]\nlisten = "unix:{tmp_path}/metrics.sock"\n')
    with programs.daemon(tmp_path / "run", "--config", str(config)) as running:
        done = running.ctl("gpu", "policy", "set", "0", "--memory-overcommit", "2.0")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("pGPU 0: memory overcommit none -> 2 times; by ")
        yield running


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def shown(daemon: Daemon, name: str) -> dict[str, Any]:
    found: dict[str, Any] = daemon.json("pod", "show", name)["pod"]
    return found


def started(daemon: Daemon, name: str, limit: int, *more: str, uses: int = 1) -> subprocess.Popen[str]:
    pod = daemon.start("run", "--name", name, "--memory", f"{limit}GiB", *more, "--", *load(uses))
    assert pod.stderr is not None
    pod.stderr.readline()
    return pod


def end(*pods: subprocess.Popen[str]) -> None:
    for pod in pods:
        pod.terminate()
        pod.communicate(timeout=TIMEOUT_S)


def test_an_online_pod_starts_on_a_card_full_of_offline_memory(daemon: Daemon, tmp_path: Path) -> None:
    train = started(daemon, "train", 140)
    web = daemon.start("run", "--name", "web", "--memory", "20GiB", "--class", "online", "--", *load(20))
    assert web.stderr is not None
    assert web.stderr.readline() == "pod web waits for memory of pGPU 0\n"
    until(lambda: bool(shown(daemon, "web")["usage"][0]["memory"]))

    assert shown(daemon, "train")["state"] == "suspended"
    assert " waiting " in daemon.ctl("pod", "list").stdout
    assert "suspended, waits for memory of pGPU 0" in daemon.ctl("pod", "show", "train").stdout
    assert "2 times, 1 GiB of pods that take turns in host memory" in daemon.ctl("gpu", "show", "0").stdout
    assert "memory of pGPU 0: overcommit 2 times, 1 GiB of pods" in daemon.ctl("status").stdout
    assert daemon.ctl("pod", "resume", "train").stdout == (
        "pod train waits for memory of pGPU 0, and comes back by itself\n"
    )
    curl = ["curl", "-s", "--unix-socket", f"{tmp_path}/metrics.sock", "http://localhost/metrics"]
    text = subprocess.run(curl, capture_output=True, text=True, check=True).stdout
    assert 'qgpu_pod_waits_for_memory{pod="train"} 1' in text
    assert "qgpu_gpu_memory_overcommit_ratio{" in text

    end(web)
    until(lambda: shown(daemon, "train")["state"] == "running")
    told = [event["what"] for event in daemon.json("events")["events"]]
    assert [what for what in told if what.startswith(("pod yields", "pod comes"))] == [
        "pod yields its memory",
        "pod comes back",
    ]
    end(train)


def test_a_pod_that_waits_for_its_turn_ends_by_a_signal(daemon: Daemon) -> None:
    train = started(daemon, "train", 140)
    other = started(daemon, "other", 140)  # it says what it waits for
    assert daemon.ctl("pod", "list").stdout.count(" waiting ") == 1
    other.terminate()
    assert other.wait(TIMEOUT_S) == 128 + 15
    until(lambda: "other" not in daemon.ctl("pod", "list").stdout)
    end(train)


def test_a_pod_without_a_limit_is_refused_under_overcommit(daemon: Daemon) -> None:
    result = daemon.ctl("run", "--name", "free", "--", "true")

    assert result.returncode == ExitCode.REFUSED
    assert result.stderr == (
        "qgpuctl: pGPU 0: its memory is overcommitted, and pod free has no limit; give it one (--memory)\n"
    )


def test_draining_takes_pods_that_wait_for_their_turn(tmp_path: Path) -> None:
    with programs.daemon(tmp_path / "run", "--sim-gpus", "3") as cards:
        assert cards.ctl("gpu", "policy", "set", "0", "--memory-overcommit", "2.0").returncode == 0
        train = started(cards, "train", 140)
        web = cards.start("run", "--name", "web", "--memory", "20GiB", "--class", "online", "--", *load(20))
        until(lambda: shown(cards, "train")["state"] == "suspended")
        assert shown(cards, "train")["yielded"]
        until(lambda: bool(shown(cards, "web")["usage"][0]["memory"]))
        drained = cards.ctl("gpu", "drain", "0")
        moved = shown(cards, "train")

        assert drained.stderr == ""
        assert drained.returncode == 0
        assert "by hand" not in drained.stdout
        assert (moved["state"], moved["yielded"], moved["grants"][0]["gpu"] in (1, 2)) == ("running", False, True)
        end(web, train)


def test_draining_leaves_a_pod_that_has_not_begun(daemon: Daemon) -> None:
    train = started(daemon, "train", 140)
    other = started(daemon, "other", 140)
    drained = daemon.ctl("gpu", "drain", "0", "--suspend")

    assert (drained.returncode, drained.stderr) == (0, "")
    assert "pod other stays on pGPU 0: it has not begun, and begins once there is memory for it\n" in drained.stdout
    assert shown(daemon, "train")["state"] == "suspended"
    end(other, train)


def test_draining_waits_for_a_pod_that_is_coming_back(tmp_path: Path) -> None:
    with programs.daemon(tmp_path / "run", "--sim-gpus", "2") as cards:
        assert cards.ctl("gpu", "policy", "set", "0", "--memory-overcommit", "2.0").returncode == 0
        train = started(cards, "train", 140, uses=20)  # it takes four seconds to come back
        web = cards.start("run", "--name", "web", "--memory", "20GiB", "--class", "online", "--", *load(1))
        until(lambda: shown(cards, "train")["state"] == "suspended")
        end(web)
        with Client(cards.runtime_dir, TIMEOUT_S) as client:
            until(lambda: client.call("pod.list")["pods"][0]["state"] != "suspended")
        drained = cards.ctl("gpu", "drain", "0")

        assert drained.stderr == ""
        assert [grant["gpu"] for grant in shown(cards, "train")["grants"]] == [1]
        end(train)


def test_show_names_the_pods_that_cannot_yield_memory(daemon: Daemon) -> None:
    gpu, status = daemon.json("gpu", "show", "0")["gpu"], daemon.json("status")
    assert dict(facts(gpu, [], status))["cannot yield memory"] == "-"

    gpu["memory_stuck"] = {"one": "memory is shared"}
    assert dict(facts(gpu, [], status))["cannot yield memory"] == "one (memory is shared)"
