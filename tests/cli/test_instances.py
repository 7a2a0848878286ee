"""MIG instances of a simulated card, as qgpuctl and the metrics show them, and pods on two of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from qgpu.errors import ExitCode
from qgpu.k8s.qgpud import Qgpud
from tests.cli import programs
from tests.cli.programs import Daemon, completed


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with two cards of two instances each."""
    with programs.daemon(tmp_path_factory.mktemp("qgpu") / "run", "--sim-gpus", "2", "--sim-mig", "2") as running:
        yield running


def test_instances_are_listed_and_named_experimental(shared: Daemon) -> None:
    assert [gpu["index"] for gpu in shared.json("gpu", "list")["gpus"]] == [101, 102, 201, 202]
    assert "MIG instances: pGPUs 101, 102, 201, 202; experimental" in shared.ctl("status").stdout
    assert "GPU 1, GPU instance 2, compute instance 0 (experimental)" in shared.ctl("gpu", "show", "202").stdout


def test_pod_runs_on_the_instance_that_it_is_given(shared: Daemon) -> None:
    program = [sys.executable, "-m", "qgpu.load.main", "--duration", "50ms"]
    done = shared.ctl("run", "--gpu", "102", "--memory", "1GiB", "--", *program)

    assert done.returncode == 0, done.stderr


def test_a_command_that_names_no_pgpu_takes_the_first(shared: Daemon) -> None:
    done = shared.ctl("run", "--", "sh", "-c", "echo $QGPU_GPU")
    tested = shared.ctl("doctor", "--self-test")

    assert done.stdout == "101\n", done.stderr
    assert "run on pGPU 101 for some seconds" in tested.stderr


def test_an_instance_is_named_by_its_uuid_too(shared: Daemon) -> None:
    uuid = "MIG-51300000-0000-0000-0000-000000000102"

    assert shared.json("gpu", "show", uuid)["gpu"]["index"] == 102
    assert shared.ctl("run", "--gpu", uuid.lower(), "--", "true").returncode == 0
    assert completed(shared, "qgpuctl run --gpu M")[1] == uuid
    assert completed(shared, "qgpuctl run --gpu 10") == ["101", "102"]


def test_pod_is_refused_two_instances_of_one_card(shared: Daemon) -> None:
    done = shared.ctl("run", "--gpu", "201", "--gpu", "202", "--", "true")

    assert "pGPUs 201 and 202 are MIG instances of one card; a pod may have one of them" in done.stderr
    assert done.returncode == ExitCode.REFUSED


def test_cdi_names_each_instance(shared: Daemon) -> None:
    devices = json.loads(shared.ctl("cdi", "show").stdout)["devices"]

    assert {"101", "MIG-51300000-0000-0000-0000-000000000101"} <= {each["name"] for each in devices}


def test_kubernetes_is_offered_no_instance(shared: Daemon) -> None:
    assert Qgpud(shared.runtime_dir).node().cards == ()
