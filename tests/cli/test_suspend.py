"""``qgpuctl pod suspend`` and ``resume``: what they print, show, and end with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qgpu.errors import ExitCode
from qgpu.ipc.control_socket import Client
from tests.cli import programs
from tests.cli.programs import TIMEOUT_S, Daemon

LOAD = (sys.executable, "-m", "qgpu.load.main", "--duration", "0s", "--memory", "64MiB", "--watch")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon of the test's own, with pod one, which holds 64 MiB."""
    with programs.daemon(tmp_path / "run", "--sim-gpus", "2") as running:
        pod = running.start("run", "--name", "one", "--memory", "1GiB", "--", *LOAD)
        assert pod.stderr is not None
        pod.stderr.readline()  # a second of it was measured
        yield running
        end(pod)


def end(pod: subprocess.Popen[str]) -> None:
    pod.terminate()
    pod.communicate(timeout=TIMEOUT_S)


def shown(daemon: Daemon) -> dict[str, object]:
    found: dict[str, object] = daemon.json("pod", "show", "one")["pod"]
    return found


def test_suspend_and_resume_say_what_they_did(daemon: Daemon) -> None:
    off = daemon.ctl("pod", "suspend", "one")
    assert (off.returncode, off.stderr) == (0, "")
    assert off.stdout.startswith("pod one suspended after ")
    assert off.stdout.endswith(", 64 MiB in host memory\n")
    assert shown(daemon)["state"] == "suspended"
    assert shown(daemon)["suspended_memory"] == {"0": 64 << 20}
    assert " suspended " in daemon.ctl("pod", "list").stdout

    back = daemon.ctl("pod", "resume", "one")
    assert (back.returncode, back.stderr) == (0, "")
    assert back.stdout.startswith("pod one running after ")
    assert shown(daemon)["state"] == "running"
    told = [event["what"] for event in daemon.json("events")["events"]]
    assert told[-2:] == ["pod told to suspend", "pod told to resume"]


def test_a_suspended_pod_is_told_from_others_by_its_metrics(tmp_path: Path) -> None:
    config = tmp_path / "qgpud.toml"
    config.write_text(f'[metrics]\nlisten = "unix:{tmp_path}/metrics.sock"\n')
    with programs.daemon(tmp_path / "run", "--config", str(config)) as running:
        pod = running.start("run", "--name", "one", "--", *LOAD)
        assert pod.stderr is not None
        pod.stderr.readline()
        assert running.ctl("pod", "suspend", "one").returncode == 0
        curl = ["curl", "-s", "--unix-socket", f"{tmp_path}/metrics.sock", "http://localhost/metrics"]
        text = subprocess.run(curl, capture_output=True, text=True, check=True).stdout
        end(pod)

    assert 'qgpu_pod_suspended{pod="one"} 1' in text
    assert f'qgpu_pod_suspended_bytes{{pod="one"}} {64 << 20}' in text
    assert 'qgpu_pod_moves_total{pod="one",direction="off"} 1' in text
    assert f'qgpu_pod_moved_bytes_total{{pod="one",direction="off"}} {64 << 20}' in text


@pytest.mark.parametrize("how", ["suspend", "resume"])
def test_a_pod_there_is_not_is_neither_suspended_nor_resumed(daemon: Daemon, how: str) -> None:
    result = daemon.ctl("pod", how, "nobody")

    assert result.returncode == ExitCode.NOT_FOUND
    assert result.stderr.startswith("qgpuctl: pod nobody: there is none of that name")


def test_a_pod_without_work_on_a_card_is_not_suspended(daemon: Daemon) -> None:
    idle = daemon.start("run", "--name", "idle", "--", "sh", "-c", "echo up; exec sleep 600")
    assert idle.stdout is not None
    idle.stdout.readline()
    result = daemon.ctl("pod", "suspend", "idle")
    end(idle)

    assert result.returncode == ExitCode.REFUSED
    assert result.stderr == "qgpuctl: pod idle: no process of it uses a card; there is nothing to suspend\n"


def test_a_request_may_return_before_it_is_done(daemon: Daemon) -> None:
    assert daemon.ctl("pod", "suspend", "one", "--no-wait").stdout == ""
    assert daemon.ctl("pod", "suspend", "one").returncode in (0, ExitCode.REFUSED)  # done, or under way
    states = {json.loads(daemon.ctl("pod", "show", "one", "-o", "json").stdout)["pod"]["state"]}

    assert states <= {"suspending", "suspended"}


def test_a_drained_card_has_no_pods_left(daemon: Daemon) -> None:
    moved = daemon.ctl("pod", "move", "one", "--gpu", "1")
    assert (moved.returncode, moved.stderr) == (0, "")
    assert moved.stdout.startswith("pod one running on pGPU 1 after ")
    assert [grant["gpu"] for grant in daemon.json("pod", "show", "one")["pod"]["grants"]] == [1]

    drained = daemon.ctl("gpu", "drain", "1")
    assert (drained.returncode, drained.stderr) == (0, "")
    assert [grant["gpu"] for grant in daemon.json("pod", "show", "one")["pod"]["grants"]] == [0]


def test_pods_of_a_drained_card_spread_over_the_others(tmp_path: Path) -> None:
    with programs.daemon(tmp_path / "run", "--sim-gpus", "3") as cards, Client(cards.runtime_dir) as client:
        for name in ("one", "two"):
            client.call("pod.create", name=name, grants={"0": {"memory": 1 << 30}})
            client.call("sim.start", pod=name, gpu=0, workload={"batch": 0})
        assert cards.ctl("gpu", "drain", "0").returncode == 0

        assert [gpu["pods"] for gpu in cards.json("gpu", "list")["gpus"]] == [0, 1, 1]
        assert cards.ctl("gpu", "drain", "0").stdout == "pGPU 0: no pods\n"


def test_a_pod_that_fits_nowhere_else_stays_or_is_suspended(daemon: Daemon) -> None:
    full = daemon.start(
        "run", "--gpu", "1", "--name", "full", "--memory", "141GiB", "--", "sh", "-c", "echo; exec sleep 600"
    )
    assert full.stdout is not None
    full.stdout.readline()
    stays = daemon.ctl("gpu", "drain", "0")
    assert stays.returncode == ExitCode.REFUSED
    assert stays.stderr == (
        "qgpuctl: pGPU 0: 1 pod stays; pGPU 1: 1 GiB for pod one does not fit; 0 B is left to grant\n"
    )

    assert daemon.ctl("gpu", "drain", "0", "--suspend").returncode == 0
    assert shown(daemon)["state"] == "suspended"
    end(full)


@pytest.mark.parametrize("how", [(), ("--suspend",)])
def test_draining_leaves_what_was_suspended_by_hand(daemon: Daemon, how: tuple[str, ...]) -> None:
    assert daemon.ctl("pod", "suspend", "one").returncode == 0
    drained = daemon.ctl("gpu", "drain", "0", *how)

    assert (drained.returncode, drained.stderr) == (0, "")
    assert drained.stdout == "pod one stays on pGPU 0: it was suspended by hand, so its memory is off the card\n"
    assert shown(daemon)["state"] == "suspended"
    assert [grant["gpu"] for grant in daemon.json("pod", "show", "one")["pod"]["grants"]] == [0]
