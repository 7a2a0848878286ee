"""Bad input: one clear line on stderr, a documented exit code, and nothing changed."""

from __future__ import annotations

import grp
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from qgpu.errors import ExitCode, QgpuError
from qgpu.ipc.control_socket import Client
from tests.cli import programs
from tests.cli.programs import Daemon

_NOBODY = 65534
SCENARIO = Path(__file__).parent.parent.parent / "examples/scenarios/online-over-offline.toml"


def one_line(text: str) -> str:
    """Return the only line of ``text``."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


def state(daemon: Daemon) -> tuple[Any, Any]:
    """Return what may not change: pods, and how pGPUs are shared."""
    with Client(daemon.runtime_dir) as client:
        pods, gpus = client.call("pod.list")["pods"], client.call("gpu.list")["gpus"]
    moving = ("now_ns", "utilization", "engine_active", "below_quota")
    shared = [{key: value for key, value in gpu.items() if key not in moving} for gpu in gpus]
    return [(pod["name"], pod["grants"]) for pod in pods], shared


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("pod", "show", "ghost"), ExitCode.NOT_FOUND, "pod ghost: there is none of that name"),
        (("pod", "set", "ghost", "--cores", "3"), ExitCode.NOT_FOUND, "pod ghost: there is none of that name"),
        (("pod", "set", "ghost"), ExitCode.USAGE, "nothing to set"),
        (("gpu", "show", "9"), ExitCode.NOT_FOUND, "pGPU 9: there is none of that number; there are: 0, 1"),
        (("gpu", "show", "GPU-9"), ExitCode.NOT_FOUND, "pGPU GPU-9: there is none of that UUID; there are: GPU-5130"),
        (("gpu", "policy", "set", "9", "0"), ExitCode.NOT_FOUND, "pGPU 9: there is none of that number"),
        (("gpu", "policy", "set", "0", "fair"), ExitCode.NOT_FOUND, "policy 'fair': there is no such policy"),
        (("gpu", "policy", "set", "0", "--period", "1ms"), ExitCode.USAGE, "period 1 ms: a period is 10 ms to 10 s"),
        (("gpu", "policy", "set", "0"), ExitCode.USAGE, "nothing to set"),
        (("gpu", "policy", "set", "0", "--offline-floor", "60%"), ExitCode.USAGE, "floor 60 %: a floor is 0 to 50 %"),
        (
            ("gpu", "policy", "set", "0", "--memory-overcommit", "9"),
            ExitCode.USAGE,
            "overcommit 9.0: a pGPU's memory is",
        ),
        (("grant", "drop", "ghost"), ExitCode.NOT_FOUND, "claim ghost: it holds nothing"),
        (("run", "--cores", "0", "--", "true"), ExitCode.USAGE, "cores 0: a quota is 1 to 100 per cent"),
        (("run", "--cores", "101", "--", "true"), ExitCode.USAGE, "cores 101: a quota is 1 to 100 per cent"),
        (("run", "--latency-target", "2ms", "--", "true"), ExitCode.USAGE, "latency target: only online pods have one"),
        (
            ("run", "--class", "online", "--latency-target", "10us", "--", "true"),
            ExitCode.USAGE,
            "latency target 0.01 ms: a target is 0.25 ms to 1 s",
        ),
        (("run", "--gpu", "-1", "--", "true"), ExitCode.USAGE, "pGPU -1: a pGPU is named by its number"),
        (("run", "--gpu", "9", "--", "true"), ExitCode.NOT_FOUND, "pGPU 9: there is none of that number"),
        (("run", "--memory", "1Gb", "--", "true"), ExitCode.USAGE, "'1Gb' is in bits; write bytes, such as 1GB"),
        (("run", "--memory", "1TiB", "--", "true"), ExitCode.REFUSED, "1 TiB for pod pod-1 does not fit"),
        (("run", "--name", "a/b", "--", "true"), ExitCode.USAGE, "pod name 'a/b'"),
        (("run", "--", "no-such-program"), 127, "no-such-program: No such file or directory"),
        (("run", "--", ""), 127, "'': no command"),
        (("run", "--", "/etc/passwd"), 126, "/etc/passwd: Permission denied"),
        (("run", "--", "/etc/passwd/x"), 126, "/etc/passwd/x: Not a directory"),
        (("events", "-n", "all"), ExitCode.USAGE, "'all' is not a valid integer"),
        (("simulate", f"{SCENARIO}", "--plot", "x.foo"), ExitCode.USAGE, "x.foo: no format of plots; end its name in"),
        (("simulate", "no-such-file"), ExitCode.USAGE, "no-such-file: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(
    shared: Daemon, arguments: tuple[str, ...], code: int, complaint: str
) -> None:
    before = state(shared)
    result = shared.ctl(*arguments)

    assert (result.returncode, result.stdout) == (code, "")
    assert complaint in one_line(result.stderr)
    assert before == state(shared)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--memory", "lots", "--", "true"),
        ("run", "--memory", "16", "--", "true"),
        ("pod", "set", "any", "--memory", "16"),
        ("run", "--memory", "9" * 400, "--", "true"),
        ("run", "--memory", "٣GiB", "--", "true"),
        ("--timeout", "nan", "status"),
        ("report", "--seconds", "nan", "--out", "/dev/null"),
        ("run", "--class", "vip", "--", "true"),
        ("run",),
        ("gpu", "policy", "set", "zero", "0"),
        ("run", "--name", "", "--", "true"),
        ("frobnicate",),
        ("--runtime-dir", "", "status"),
        ("run", "--core", "60", "--", "true"),
        ("status", "-o", "yaml"),
    ],
)
def test_misuse_of_the_command_line_is_usage(shared: Daemon, arguments: tuple[str, ...]) -> None:
    result = shared.ctl(*arguments)

    assert (result.returncode, result.stdout) == (ExitCode.USAGE, "")
    assert one_line(result.stderr).endswith("--help")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("stauts",), "'status'"),
        (("pods",), "'pod'"),
        (("gpu", "show", "first"), "'first' is not a number such as 0, or a UUID such as GPU-5f2b1c5e or MIG-5f2b1c5e"),
        (("run", "--gpu", "GPU-5130", "--", "true"), "'GPU-5130' begins the UUIDs of several pGPUs"),
        (("--timeout", "soon", "status"), "'soon' is not a number of seconds from 0.1 to 3600"),
        (("--timeout", "0", "status"), "'0' is not a number of seconds from 0.1 to 3600"),
    ],
)
def test_misuse_is_told_what_was_probably_meant(shared: Daemon, arguments: tuple[str, ...], says: str) -> None:
    assert says in one_line(shared.ctl(*arguments).stderr)


def test_without_a_daemon_a_request_says_so_and_runs_nothing(tmp_path: Path) -> None:
    for arguments in (("status",), ("pod", "list"), ("top", "-1"), ("run", "--", "touch", str(tmp_path / "ran"))):
        result = programs.qgpuctl(tmp_path, "--timeout", "0.3", *arguments)

        assert result.returncode == ExitCode.DAEMON_UNREACHABLE
        assert one_line(result.stderr).endswith(f"; start it: qgpud --runtime-dir {tmp_path}")
    assert not (tmp_path / "ran").exists()


def test_a_second_daemon_is_told_so_and_the_first_goes_on(shared: Daemon) -> None:
    result = programs.qgpud("--plane", "sim", "--runtime-dir", str(shared.runtime_dir))

    assert result.returncode == ExitCode.ALREADY_RUNNING
    assert "another qgpud is running there" in one_line(result.stderr)
    assert shared.ctl("status").returncode == ExitCode.OK


def test_runtime_directory_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    result = programs.qgpud("--plane", "sim", "--runtime-dir", str(tmp_path / ("x" * 100)))

    assert result.returncode == ExitCode.USAGE
    assert "too long for sockets in it" in one_line(result.stderr)


def test_a_state_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    result = programs.qgpud("--plane", "sim", "--runtime-dir", str(tmp_path), "--state-dir", "/proc/state")

    assert result.returncode == ExitCode.USAGE
    assert "choose another --state-dir" in one_line(result.stderr)


@pytest.mark.parametrize(
    ("arguments", "redirected", "complaint"),
    [
        ("pod list", ">/dev/full", "standard output: No space left on device"),
        ("status -o json", ">&-", ""),
        ("pod list", "<&-", ""),
    ],
)
def test_output_that_cannot_be_written_is_one_line(
    shared: Daemon, arguments: str, redirected: str, complaint: str
) -> None:
    result = programs.qgpuctl_in_shell(shared.runtime_dir, f"{arguments} {redirected}")

    assert result.returncode == (ExitCode.FAILED if complaint else ExitCode.OK)
    assert complaint in (one_line(result.stderr) if complaint else result.stderr)
    assert "Traceback" not in result.stderr


def test_daemon_starts_with_another_services_environment(tmp_path: Path) -> None:
    strange = {"NOTIFY_SOCKET": str(tmp_path / "nobody"), "LISTEN_FDS": "many", "LISTEN_PID": "1"}
    with programs.daemon(tmp_path / "run", more=strange) as running:
        assert running.ctl("status").returncode == ExitCode.OK


def test_a_config_with_a_typo_starts_nothing(tmp_path: Path) -> None:
    config = tmp_path / "qgpu.toml"
    config.write_text('[defaults]\npolcy = "fixed-share"\n')
    result = programs.qgpud("--config", str(config), "--runtime-dir", str(tmp_path / "run"))

    assert result.returncode == ExitCode.USAGE
    assert f"{config}: defaults.polcy: no such key" in one_line(result.stderr)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia/version"), reason="there is a GPU driver here")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gets as far as looking for a GPU")
@pytest.mark.parametrize("plane", ["seccomp", "kmod"])
def test_a_plane_that_needs_a_gpu_says_that_there_is_none(tmp_path: Path, plane: str) -> None:
    result = programs.qgpud("--plane", plane, "--runtime-dir", str(tmp_path))

    assert result.returncode == ExitCode.NOT_LOADED
    assert f"plane {plane}" in one_line(result.stderr)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become another user")
def test_somebody_else_may_look_but_not_touch(shared: Daemon) -> None:
    before = state(shared)
    refused, seen = _as_nobody(shared.runtime_dir)

    assert seen == "sim"
    assert refused == f"{ExitCode.NO_PERMISSION.value} permission denied; use sudo"
    assert before == state(shared)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become another user")
def test_members_of_the_sockets_group_may_change_things(tmp_path: Path) -> None:
    config = tmp_path / "qgpu.toml"
    config.write_text(f'[socket]\ngroup = "{grp.getgrgid(_NOBODY).gr_name}"\n')
    with programs.daemon(tmp_path / "run", "--config", str(config)) as running:
        group = grp.getgrgid(_NOBODY).gr_name
        refused = f"{ExitCode.NO_PERMISSION.value} permission denied; use sudo, or join group {group}"
        assert _as_nobody(running.runtime_dir) == (refused, "sim")
        assert _as_nobody(running.runtime_dir, _NOBODY) == ("allowed", "sim")
        assert running.json("gpu", "show", "0")["gpu"]["policy"] == "best-effort"


def _as_nobody(runtime_dir: Path, *groups: int) -> tuple[str, str]:
    """Ask as another user, from a child that gives its rights away for good."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.chdir(runtime_dir)  # the way there need not be open to everybody; the socket is
            os.setgroups(groups)
            os.setgid(_NOBODY - 1)
            os.setuid(_NOBODY)
            with Client(Path()) as client:
                os.write(write, f"{_try_to_change(client)}\n{client.call('status')['plane']}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        refused, _, seen = pipe.read().partition("\n")
    os.waitpid(child, 0)
    return refused, seen


def _try_to_change(client: Client) -> str:
    try:
        client.call("gpu.set", gpu=0, policy="best-effort")
    except QgpuError as error:
        return f"{error.code.value} {error}"
    return "allowed"


def test_a_pod_whose_quota_does_not_fit_is_not_started(shared: Daemon, tmp_path: Path) -> None:
    holder = shared.start("run", "--name", "holder", "--cores", "80", "--", "sh", "-c", "echo up; exec sleep 60")
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        before = state(shared)
        for gpu, said in ((1, "pod holder: it has no grant on pGPU 1; see: qgpuctl pod show holder"), (7, "pGPU 7: ")):
            result = shared.ctl("pod", "set", "holder", "--gpu", f"{gpu}", "--cores", "5")
            assert (result.returncode, said in one_line(result.stderr)) == (ExitCode.NOT_FOUND, True), result.stderr
        result = shared.ctl("run", "--cores", "21", "--", "touch", str(tmp_path / "ran"))

        assert result.returncode == ExitCode.REFUSED
        assert "21 % for pod pod-1 does not fit; 20 % is left to grant" in one_line(result.stderr)
        assert not (tmp_path / "ran").exists()
        assert before == state(shared)
        for arguments in (("pod", "set", "holder", "--cores", "0"), ("pod", "set", "holder", "--cores", "101")):
            assert shared.ctl(*arguments).returncode == ExitCode.USAGE
        assert before == state(shared)
    finally:
        holder.send_signal(signal.SIGTERM)
        holder.communicate(timeout=programs.TIMEOUT_S)


def test_an_argument_of_several_lines_gets_one_line(shared: Daemon) -> None:
    result = shared.ctl("pod", "show", "a\nb")

    assert (result.returncode, one_line(result.stderr)) == (ExitCode.NOT_FOUND, result.stderr.strip())


def test_a_policy_that_would_starve_a_running_pod_is_refused(shared: Daemon) -> None:
    guest = shared.start("run", "--name", "guest", "--", "sh", "-c", "echo up; exec sleep 60")
    assert guest.stdout is not None
    guest.stdout.readline()
    try:
        before = state(shared)
        result = shared.ctl("gpu", "policy", "set", "0", "fixed-share")

        assert result.returncode == ExitCode.REFUSED
        assert "offline pod guest has none" in one_line(result.stderr)
        assert before == state(shared)
    finally:
        guest.send_signal(signal.SIGTERM)
        guest.communicate(timeout=programs.TIMEOUT_S)


def test_a_self_test_that_is_interrupted_is_none_that_passed(shared: Daemon) -> None:
    command = shared.start("doctor", "--self-test")
    with Client(shared.runtime_dir) as client:
        while not any(pod["name"].startswith("self-test") for pod in client.call("pod.list")["pods"]):
            time.sleep(0.01)
    command.send_signal(signal.SIGINT)
    printed, said = command.communicate(timeout=programs.TIMEOUT_S)

    assert (command.returncode, printed) == (ExitCode.INTERRUPTED, "")
    assert "Traceback" not in said
    assert not shared.json("pod", "list")["pods"]


@pytest.mark.parametrize("command", ["completion bash", "man pod", "top -o json --every 0.2"])
def test_a_closed_pipe_has_a_code_of_its_own(shared: Daemon, command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "qgpu.cli.main", "--runtime-dir", str(shared.runtime_dir), *command.split()],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=programs.TIMEOUT_S,
        check=False,
    )
    os.close(writer)

    assert (result.returncode, result.stderr) == (ExitCode.BROKEN_PIPE, b"")
