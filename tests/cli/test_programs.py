"""What users do every day, with real processes on the simulator."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from qgpu.cli.context import Context
from qgpu.errors import ExitCode, QgpuError
from qgpu.ipc.control_socket import Client
from tests.cli import programs
from tests.cli.programs import TIMEOUT_S, Daemon


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill $$", 143)])
def test_run_ends_with_its_commands_exit_code(shared: Daemon, script: str, code: int) -> None:
    assert shared.ctl("run", "--", "sh", "-c", script).returncode == code


def test_run_tells_its_command_which_pod_it_is(shared: Daemon) -> None:
    result = shared.ctl("run", "--gpu", "1", "--name", "me", "--", "sh", "-c", "echo $QGPU_POD $QGPU_PLANE $QGPU_GPU")

    assert result.stdout == "me sim 1\n"


def test_run_passes_signals_on(shared: Daemon) -> None:
    waiting = shared.start("run", "--", "sh", "-c", "trap 'exit 5' TERM; echo up; while :; do sleep 0.05; done")
    assert waiting.stdout is not None
    waiting.stdout.readline()
    waiting.send_signal(signal.SIGTERM)

    assert waiting.wait(TIMEOUT_S) == 5
    waiting.communicate()


COUNTS_CTRL_C = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
print("up", flush=True)
signal.sigwaitinfo({signal.SIGINT})
count = 1
while signal.sigtimedwait({signal.SIGINT}, 1):
    count += 1
print("caught", count, "end", flush=True)
"""


def test_ctrl_c_at_the_terminal_reaches_the_command_once(shared: Daemon) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "qgpu.cli.main", "--runtime-dir", str(shared.runtime_dir), "run", "--"]
        os.execvpe(command[0], [*command, sys.executable, "-c", COUNTS_CTRL_C], programs.environment())
    said = b""
    while b"end" not in said:
        said += os.read(terminal, 4096)
        if b"up" in said and b"^C" not in said:
            os.write(terminal, b"\x03")
            said += b"^C"
    os.waitpid(pid, 0)
    os.close(terminal)

    assert b"caught 1 end" in said


def test_a_pod_is_gone_when_its_command_has_ended(shared: Daemon) -> None:
    shared.ctl("run", "--name", "brief", "--", "true")

    assert shared.json("pod", "list")["pods"] == []


def test_pod_outlives_its_launcher_until_its_last_process_ends(shared: Daemon) -> None:
    launcher = shared.start("run", "--name", "orphan", "--", "sh", "-c", "echo $$; exec sleep 60")
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait(TIMEOUT_S)
    sentinel = shared.ctl("pod", "show", "orphan", "-o", "json")
    _end(pid)

    assert json.loads(sentinel.stdout)["pod"]["pids"] == [pid]
    while shared.json("pod", "list")["pods"]:  # the daemon looks twice a second; the test's timeout is the bound
        pass
    launcher.communicate()


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_a_card_may_be_named_by_its_uuid(shared: Daemon) -> None:
    uuid = shared.json("gpu", "show", "1")["gpu"]["uuid"]

    assert shared.json("gpu", "show", uuid.lower())["gpu"]["index"] == 1
    program = f"{sys.executable} -m qgpu.cli.main"
    shown = shared.ctl("run", "--gpu", uuid, "--", "sh", "-c", f'{program} pod show "$QGPU_POD"')
    assert "pGPU 1\n" in shown.stdout, shown.stderr


@pytest.mark.parametrize("words", [("status",), ("gpu", "show", "0"), ("pod", "list"), ("top", "-1")])
def test_json_may_be_asked_for_by_its_name(shared: Daemon, words: tuple[str, ...]) -> None:
    short, long = shared.ctl(*words, "-o", "json"), shared.ctl(*words, "--json")

    assert json.loads(long.stdout).keys() == json.loads(short.stdout).keys(), long.stderr


def test_grants_and_policies_change_while_pods_run(shared: Daemon) -> None:
    pod = shared.start(
        "run", "--gpu", "1", "--name", "live", "--cores", "30", "--", "sh", "-c", "echo up; exec sleep 60"
    )
    assert pod.stdout is not None
    pod.stdout.readline()
    try:
        changes = ("--cores", "50", "--class", "online", "--memory", "8GiB", "--latency-target", "2ms")
        assert shared.ctl("pod", "set", "live", *changes).returncode == ExitCode.OK
        said = shared.ctl("gpu", "policy", "set", "1", "1", "--period", "50ms")
        assert said.returncode == ExitCode.OK
        assert said.stdout.startswith("pGPU 1: policy burst-share -> fixed-share, period 100 ms -> 50 ms; by ")

        grant = {"gpu": 1, "class": "online", "cores": 50, "memory": 8 << 30, "latency_target_ns": 2_000_000}
        grant |= {"cores_percent": 50, "memory_bytes": 8 << 30, "profiling": False, "graphics": False}
        assert shared.json("pod", "show", "live")["pod"]["grants"] == [grant]
        gpu = shared.json("gpu", "show", "1")["gpu"]
        assert (gpu["policy"], gpu["period_ns"], gpu["pods"]) == ("fixed-share", 50_000_000, 1)
        said = shared.ctl("pod", "set", "live", "--cores", "none")
        assert said.stdout.startswith("pod live: pGPU 1: quota 50 % -> none; by ")
        assert shared.json("pod", "show", "live")["pod"]["grants"][0]["cores"] is None
        offline = shared.ctl("pod", "set", "live", "--class", "offline")
        assert (offline.returncode, offline.stderr.count("\n")) == (ExitCode.USAGE, 1)
        assert "latency target: only online pods have one" in offline.stderr
        changes = ("--cores", "20", "--class", "offline", "--latency-target", "none")
        assert shared.ctl("pod", "set", "live", *changes).returncode == ExitCode.OK
        grant |= {"class": "offline", "cores": 20, "cores_percent": 20, "latency_target_ns": None}
        assert shared.json("pod", "show", "live")["pod"]["grants"] == [grant]
    finally:
        pod.send_signal(signal.SIGTERM)
        pod.communicate(timeout=TIMEOUT_S)
        shared.ctl("gpu", "policy", "set", "1", "burst-share", "--period", "100ms")


def test_profiling_is_allowed_shown_and_recorded(shared: Daemon) -> None:
    pod = shared.start("run", "--name", "profiled", "--allow-profiling", "--", "sh", "-c", "echo up; exec sleep 60")
    assert pod.stdout is not None
    pod.stdout.readline()
    try:
        assert shared.json("pod", "show", "profiled")["pod"]["grants"][0]["profiling"] is True
        said = shared.ctl("pod", "set", "profiled", "--refuse-profiling").stdout
        assert said.startswith("pod profiled: pGPU 0: profiling allowed -> refused; by ")
        shown = shared.ctl("pod", "show", "profiled").stdout.split()
        assert shown[shown.index("profiling") + 1] == "refused"
        shared.ctl("pod", "set", "profiled", "--allow-profiling")
        shown = shared.ctl("pod", "show", "profiled").stdout.split()
        assert shown[shown.index("profiling") + 1] == "allowed"
        assert "profiling refused -> allowed" in shared.ctl("events").stdout
    finally:
        pod.send_signal(signal.SIGTERM)
        pod.communicate(timeout=TIMEOUT_S)


def test_two_loads_share_by_quota_and_top_shows_it(shared: Daemon) -> None:
    loads = [
        shared.start(
            *("run", "--name", name, "--cores", cores, "--"),
            *(sys.executable, "-m", "qgpu.load.main", "--duration", "60s"),
        )
        for name, cores in (("two", "60"), ("one", "30"))
    ]
    try:
        while True:  # until both are at it; the test's timeout is the bound
            shares = {row["pod"]: row["share"] for row in shared.json("top", "-1")["shares"]}
            if len(shares) == 2 and sum(shares.values()) > 0.95 and min(shares.values()) > 0.2:
                break
        settled = {row["pod"]: row["share"] for row in shared.json("top", "-1", "--every", "2")["shares"]}
        for load in loads:
            load.send_signal(signal.SIGTERM)
        results = [json.loads(load.communicate(timeout=TIMEOUT_S)[0]) for load in loads]

        assert settled["two"] / settled["one"] == pytest.approx(2.0, rel=0.05)
        assert all(result["kernels"] > 0 for result in results)
    finally:
        for load in loads:
            load.kill()
            load.wait(TIMEOUT_S)


def test_the_self_test_finds_shares_enforced(shared: Daemon) -> None:
    result = shared.ctl("doctor", "--self-test", "-o", "json")

    verdicts = {check["name"]: check["verdict"] for check in json.loads(result.stdout)["checks"]}
    assert {"burst share": "ok", "GPU time": "ok", "gate": "ok"}.items() <= verdicts.items(), result.stdout
    assert result.returncode in (ExitCode.OK, ExitCode.NOT_SUPPORTED)


def test_status_says_on_what_plane_and_why(shared: Daemon) -> None:
    answer = shared.json("status")

    assert (answer["schema"], answer["plane"], answer["why"]) == ("qgpu/v1", "sim", "asked for")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_daemon_ends_orderly(tmp_path: Path, number: signal.Signals) -> None:
    running = Daemon(tmp_path, "--plane", "sim")

    assert running.stop(number) == ExitCode.OK
    assert not (tmp_path / "qgpud.sock").exists()


def test_a_daemon_starts_where_another_was_killed(tmp_path: Path) -> None:
    Daemon(tmp_path, "--plane", "sim").stop(signal.SIGKILL)

    with programs.daemon(tmp_path) as running:
        assert running.ctl("status").returncode == ExitCode.OK


def test_the_daemon_logs_json_where_nobody_watches(shared: Daemon) -> None:
    assert json.loads(shared.first_line)["event"] == "ready"


def test_pod_ended_during_start_leaves_no_process(shared: Daemon) -> None:
    with Client(shared.runtime_dir) as client:
        for _ in range(5):
            pod = shared.start("run", "--name", "brief", "--", "sleep", "600")
            while not client.call("pod.list")["pods"]:
                time.sleep(0.01)
            pod.send_signal(signal.SIGTERM)
            _, said = pod.communicate(timeout=TIMEOUT_S)  # to the end of whoever holds its output

            assert (pod.returncode, "Traceback" in said) == (128 + signal.SIGTERM, False)
            assert not client.call("pod.list")["pods"]


def test_the_daemon_has_as_many_descriptors_as_it_may(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1024), hard))
    try:
        with programs.daemon(tmp_path / "run") as daemon:
            assert resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_an_older_daemon_does_not_tell_is_one_line(shared: Daemon) -> None:
    (gpu, _) = Context(shared.runtime_dir, 10.0).ask("gpu.list")["gpus"]
    with pytest.raises(QgpuError, match="its answer has no 'altitude'; is it older than qgpuctl"):
        gpu["altitude"]


def test_a_card_is_configured_by_its_uuid(tmp_path: Path) -> None:
    with programs.daemon(tmp_path / "run", "--sim-gpus", "2") as daemon:
        uuid = daemon.json("gpu", "show", "1")["gpu"]["uuid"]
    config = tmp_path / "qgpu.toml"
    config.write_text(f'[gpu.{uuid}]\npolicy = "best-effort"\n')
    with programs.daemon(tmp_path / "run", "--sim-gpus", "2", "--config", str(config)) as daemon:
        policies = [gpu["policy"] for gpu in daemon.json("gpu", "list")["gpus"]]

    assert policies == ["burst-share", "best-effort"]
