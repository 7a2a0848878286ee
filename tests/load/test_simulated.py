"""qgpu-load in a pod of a simulated plane: the same command, the same result, no CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from qgpu.errors import DaemonUnreachableError, ExitCode
from qgpu.ipc.control_socket import Client


@pytest.fixture(scope="module")
def qgpuctl(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QGPU_")}
    options = ["--runtime-dir", str(directory)]
    daemon = subprocess.Popen(
        [sys.executable, "-c", "from qgpu.daemon.main import main; main()", *options, "--plane", "sim"],
        env=environment,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        while daemon.poll() is None:
            try:
                Client(directory).close()
                break
            except DaemonUnreachableError:
                continue

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-c", "from qgpu.cli.main import main; main()", *options, *arguments]
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

        yield run
    finally:
        daemon.terminate()
        daemon.wait(60)


LOAD = ("--", sys.executable, "-m", "qgpu.load.main", "--duration", "1s")


def test_a_flood_alone_runs_at_the_simulated_card_s_speed(qgpuctl):
    ended = qgpuctl("run", *LOAD, "--kernel", "1ms")

    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["kernels_per_s"] == pytest.approx(1000, rel=0.05)  # by the simulator's clock, not the host's
    assert result["latency_us"] is None
    assert sum(kernels for _, kernels in result["windows"]) == result["kernels"]
    assert "H200" in result["device"]


def test_a_periodic_load_has_a_latency_for_each_batch(qgpuctl):
    ended = qgpuctl("run", "--class", "online", *LOAD, "--kernel", "100us", "--period", "10ms", "--watch")

    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["latency_us"]["n"] == pytest.approx(result["kernels"], abs=1)
    assert result["latency_us"]["p50"] >= 100


def test_warming_up_is_not_measured(qgpuctl):
    ended = qgpuctl("run", *LOAD, "--kernel", "1ms", "--warmup", "500ms", "--count", "100")

    assert json.loads(ended.stdout)["kernels"] == 100
    assert json.loads(ended.stdout)["elapsed_s"] <= 1


def test_a_gpu_that_is_not_there_is_a_plain_refusal(qgpuctl):
    ended = qgpuctl("run", "--gpu", "7", *LOAD)

    assert ended.returncode != 0
    assert ended.stderr.count("\n") == 1


def test_a_gpu_beyond_those_of_the_pod_is_refused(qgpuctl):
    ended = qgpuctl("run", *LOAD, "--gpu", "3")

    assert ended.returncode == ExitCode.NOT_LOADED
    assert ended.stderr == "qgpu-load: no GPU 3 in this pod; its last one is --gpu 0\n"


def test_a_gpu_that_the_environment_misnames_is_refused(qgpuctl):
    ended = qgpuctl("run", "--", "env", "QGPU_GPU=first", *LOAD[1:])

    assert ended.returncode == ExitCode.USAGE
    assert ended.stderr == "qgpu-load: QGPU_GPU: 'first' is no number of a pGPU; qgpuctl run sets it\n"


def test_memory_beyond_the_limit_is_refused_in_its_units(qgpuctl):
    ended = qgpuctl("run", "--name", "small", "--memory", "100MiB", *LOAD, "--memory", "200MiB")

    assert ended.returncode == ExitCode.REFUSED
    assert ended.stderr == "qgpu-load: pod small: memory limit of 100 MiB on pGPU 0: 200 MiB more do not fit\n"
