"""qgpu-load as a process, on a driver that runs nothing but is strict about how it is called."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

SHORT = ("--duration", "200ms", "--iterations", "10000")


@pytest.mark.parametrize(
    ("options", "has_latency"),
    [
        (("--kernel", "1ms"), False),
        (("--kernel", "50us"), False),
        (("--kernel", "100ms"), False),
        (("--kernel", "1ms", "--streams", "3"), False),
        (("--kernel", "1ms", "--graph"), False),
        (("--kernel", "1ms", "--batch", "3"), True),
        (("--kernel", "1ms", "--batch", "3", "--graph"), True),
        (("--kernel", "1ms", "--batch", "5", "--streams", "2", "--gap", "50us"), True),
        (("--kernel", "100us", "--period", "10ms"), True),
        (("--kernel", "100us", "--period", "10ms", "--batch", "4", "--graph"), True),
    ],
)
def test_every_mode_counts_finished_kernels(load, options, has_latency):
    iterations = {"50us": "500", "100us": "1000", "1ms": "10000", "100ms": "1000000"}[options[1]]
    ended = load(*options, "--duration", "0s", "--count", "12", "--iterations", iterations)

    assert ended.code == 0, ended.stderr
    assert 12 <= ended.result["kernels"] <= ended.driver["launched"]
    assert sum(kernels for _, kernels in ended.result["windows"]) == ended.result["kernels"]
    assert (ended.result["latency_us"] is not None) is has_latency


@pytest.mark.parametrize("options", [(), ("--host-reads",)])
def test_persistent_kernel_launches_once_and_counts_rounds(load, options):
    ended = load("--kernel", "1ms", "--persistent", *options, "--duration", "300ms", "--iterations", "10000")

    assert ended.code == 0, ended.stderr
    assert ended.driver["launched"] == 2  # the first kernel and this
    assert 0 < ended.result["kernels"] <= 1000
    assert sum(kernels for _, kernels in ended.result["windows"]) == ended.result["kernels"]


def test_several_processes_are_one_load(load):
    ended = load("--kernel", "1ms", "--processes", "3", "--count", "40", "--duration", "0s")

    assert ended.code == 0, ended.stderr
    assert ended.result["processes"] == 3
    assert ended.result["kernels"] == 120
    assert sum(kernels for _, kernels in ended.result["windows"]) == 120
    assert ended.result["iterations"] > 1


def test_one_process_that_fails_fails_the_load(load):
    ended = load("--processes", "2", *SHORT, FAKE_CUDA_FAIL="cuLaunchKernel:12345")

    assert ended.code == 1
    assert "one of 2 processes ended with code 1" in ended.stderr
    assert ended.result == {}


@pytest.mark.parametrize("kernel", ["20us", "50us", "1ms", "8ms"])
def test_a_flood_keeps_its_queue_bounded(load, kernel):
    ended = load("--kernel", kernel, "--duration", "300ms", "--iterations", "10000")

    assert 2 <= ended.driver["most_queued"] <= 512


def test_latency_is_at_least_the_kernel(load):
    ended = load("--kernel", "1ms", "--period", "10ms", *SHORT)

    assert ended.result["latency_us"]["p50"] >= 1000


def test_calibration_finds_the_iterations_of_a_length(load):
    ended = load("--kernel", "2ms", "--count", "1", FAKE_CUDA_NS_PER_ITERATION="250")

    assert ended.result["iterations"] == pytest.approx(8000, rel=0.2)
    assert ended.result["gpu_kernel_us"] == pytest.approx(2000, rel=0.2)


def test_given_iterations_are_taken_and_nothing_is_measured(load):
    ended = load("--iterations", "1234", "--batch", "1", "--count", "5")

    assert ended.result["iterations"] == 1234
    assert ended.result["gpu_kernel_us"] is None
    assert ended.driver["launched"] == 6  # the first kernel and five


def test_count_ends_the_load(load):
    ended = load("--batch", "4", "--count", "10", "--iterations", "100", "--duration", "0s")

    assert ended.result["kernels"] == 10


def test_measuring_starts_when_asked(load):
    at = time.time() + 0.8
    ended = load("--start-at", str(at), "--warmup", "100ms", *SHORT)

    assert ended.result["started_ns"] >= (at - 0.001) * 1e9


def test_being_late_for_the_start_is_said(load):
    ended = load("--start-at", str(time.time() - 5), *SHORT)

    assert ended.code == 0
    assert "late for --start-at" in ended.stderr


@pytest.mark.parametrize(("sync", "flags"), [("spin", 1), ("yield", 2), ("block", 4)])
def test_the_context_waits_as_asked(load, sync, flags):
    ended = load("--sync", sync, "--batch", "1", "--count", "1", "--iterations", "10")

    assert ended.driver["flags"] == flags


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("options", [(), ("--batch", "1", "--gap", "60s"), ("--period", "10ms"), ("--persistent",)])
def test_a_signal_ends_the_load_and_the_result_is_printed(load_env, number, options):
    command = [sys.executable, "-m", "qgpu.load.main", "--duration", "0s", "--iterations", "1000", "--start-at", "1"]
    process = subprocess.Popen([*command, *options], env=load_env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stderr.readline()  # it says that it is late for its start: it is about to start
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)

    assert process.returncode == 0, errors
    assert json.loads(output)["schema"] == "qgpu/v1"


@pytest.mark.parametrize(
    ("environment", "code", "words"),
    [
        ({"QGPU_LIBCUDA": "/nowhere/libcuda.so"}, 9, "no CUDA driver"),
        ({"FAKE_CUDA_FAIL": "cuInit:100"}, 9, "cuInit: CUDA_ERROR_NO_DEVICE"),
        ({"FAKE_CUDA_FAIL": "cuMemAlloc_v2:2"}, 1, "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY"),
        ({"FAKE_CUDA_FAIL": "cuLaunchKernel:12345"}, 1, "cuLaunchKernel: CUDA error 12345"),
        ({"QGPU_PLANE": "sim", "QGPU_RUNTIME_DIR": "/nowhere"}, 20, "; start it: qgpud --runtime-dir /nowhere"),
    ],
)
def test_trouble_is_one_line_and_a_code(load, environment, code, words):
    ended = load(*SHORT, **environment)

    assert ended.code == code
    assert words in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [
        ("--kernel", "1"),
        ("--kernel", "0s"),
        ("--batch", "-1"),
        ("--streams", "0"),
        ("--batch", "0", "--period", "1ms"),
        ("--persistent", "--batch", "1"),
        ("--host-reads",),
        ("--processes", "0"),
    ],
)
def test_a_wrong_option_is_a_usage_error(load, options):
    ended = load(*options)

    assert ended.code == 2
    assert ended.result == {}


def test_another_gpu_than_there_is_is_refused(load):
    ended = load("--gpu", "1", *SHORT)

    assert ended.code == 9
    assert "CUDA_ERROR_INVALID_DEVICE" in ended.stderr


@pytest.mark.parametrize("options", [("--kernel", "1ms"), ("--kernel", "8ms", "--graph"), ("--kernel", "50us")])
def test_a_load_ends_with_nothing_queued(load, options):
    ended = load(*options, "--duration", "200ms", "--iterations", "10000")

    assert ended.driver["left"] == 0


def test_flood_reports_host_absence_that_drained_the_queue(load_env, tmp_path):
    result = tmp_path / "result.json"
    options = ["--kernel", "1ms", "--iterations", "10000", "--duration", "0s", "--json", str(result), "--watch"]
    command = [sys.executable, "-m", "qgpu.load.main", *options]
    with subprocess.Popen(command, env=load_env, stderr=subprocess.PIPE) as process:
        assert process.stderr
        process.stderr.readline()  # it has run for a second
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        process.send_signal(signal.SIGCONT)
        process.stderr.readline()  # and for another, in which it finds its queue empty
        process.terminate()
        process.communicate(timeout=60)
    found = json.loads(result.read_text())

    assert found["dry"] >= 1
    assert found["dry_longest_ms"] >= 190
