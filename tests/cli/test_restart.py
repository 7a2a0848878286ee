"""What outlives a daemon: its control socket in the service manager's store, and what was set at run time."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from qgpu.config import GpuSettings
from qgpu.daemon.state import State
from qgpu.errors import ExitCode
from qgpu.ipc.control_socket import Client
from tests.cli import programs
from tests.cli.manager import Manager
from tests.cli.programs import TIMEOUT_S, qgpuctl

CONFIGURED = GpuSettings()
SET = GpuSettings(policy="fixed-share")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path)
    yield made
    made.close()


def end(process: subprocess.Popen[bytes], how: str = "terminate") -> None:
    getattr(process, how)()
    process.wait(TIMEOUT_S)


def policy(runtime_dir: Path) -> str:
    answer = json.loads(qgpuctl(runtime_dir, "gpu", "show", "0", "-o", "json").stdout)
    return str(answer["gpu"]["policy"])


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_request_between_two_daemons_is_answered_by_the_next(manager: Manager, how: str) -> None:
    end(manager.start(), how)
    with Client(manager.runtime_dir, TIMEOUT_S) as waiting:
        daemon = manager.start()
        try:
            assert waiting.call("status")["plane"] == "sim"
        finally:
            end(daemon)


def test_without_its_path_a_stored_socket_is_replaced(manager: Manager) -> None:
    end(manager.start())
    (manager.runtime_dir / "qgpud.sock").unlink()
    daemon = manager.start()
    try:
        assert qgpuctl(manager.runtime_dir, "status").returncode == ExitCode.OK
    finally:
        end(daemon)


def test_a_policy_set_at_run_time_outlives_the_daemon(manager: Manager) -> None:
    first = manager.start()
    assert qgpuctl(manager.runtime_dir, "gpu", "policy", "set", "0", "fixed-share").returncode == ExitCode.OK
    end(first, "kill")
    second = manager.start()
    try:
        assert policy(manager.runtime_dir) == "fixed-share"
    finally:
        end(second)


def test_service_manager_gets_watchdog_and_stopping_messages(manager: Manager) -> None:
    daemon = manager.start()

    assert manager.hear() == "WATCHDOG=1"

    end(daemon)
    while (word := manager.hear()) == "WATCHDOG=1":
        pass
    assert word == "STOPPING=1"


def test_with_no_state_directory_nothing_is_kept(tmp_path: Path) -> None:
    with programs.daemon(tmp_path / "run") as running:
        assert running.ctl("gpu", "policy", "set", "0", "fixed-share").returncode == ExitCode.OK
    with programs.daemon(tmp_path / "run"):
        assert policy(tmp_path / "run") == "burst-share"


def test_a_state_directory_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    result = programs.qgpud(
        "--plane", "sim", "--runtime-dir", str(tmp_path / "run"), "--state-dir", f"{tmp_path}/file/x"
    )

    assert (result.returncode, len(result.stderr.splitlines())) == (ExitCode.NO_PERMISSION, 1)
    assert "--state-dir" in result.stderr


def test_changed_configuration_overrides_kept_settings(tmp_path: Path) -> None:
    State(tmp_path).keep("GPU-1", CONFIGURED, SET)

    assert State(tmp_path).settings("GPU-1", CONFIGURED) == SET
    assert State(tmp_path).settings("GPU-2", CONFIGURED) == CONFIGURED
    changed = GpuSettings(policy="best-effort")
    assert State(tmp_path).settings("GPU-1", changed) == changed


def test_setting_what_is_configured_leaves_nothing_behind(tmp_path: Path) -> None:
    state = State(tmp_path)
    state.keep("GPU-1", CONFIGURED, SET)
    state.keep("GPU-1", CONFIGURED, CONFIGURED)

    assert json.loads((tmp_path / "state.json").read_text())["gpus"] == {}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 2, "gpus": {}}',
        '{"version": 1}',
        '{"version": 1, "gpus": []}',
        '{"version": 1, "gpus": {"GPU-1": {"set": {"policy": "no-such"}, "over": {}}}}',
        '{"version": 1, "gpus": {"GPU-1": {"set": {"period_ns": 1}, "over": {}}}}',
        '{"version": 1, "gpus": {"GPU-1": {"set": {"period_ns": "1"}, "over": {}}}}',
        '{"version": 1, "gpus": {"GPU-1": {"set": {"period_ns": 1e8}, "over": {}}}}',
        '{"version": 1, "gpus": {"GPU-1": {"set": {"offline_floor": 0.5}, "over": {}}}}',
        '{"version": 1, "gpus": {"GPU-1": {"set": {"speed": 1}, "over": {}}}}',
        "[" * 100_000,
        "\x00",
        '"\\ud800"',
    ],
)
def test_bad_state_file_is_one_line_and_configuration_applies(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state.json").write_text(content)
    state = State(tmp_path)

    assert state.settings("GPU-1", CONFIGURED) == CONFIGURED
    assert len(capsys.readouterr().out.splitlines()) == 1
    state.keep("GPU-1", CONFIGURED, SET)
    assert State(tmp_path).settings("GPU-1", CONFIGURED) == SET


def test_a_state_file_that_is_not_text_is_one_line_too(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes(b"\xff\xfe")

    assert State(tmp_path).settings("GPU-1", CONFIGURED) == CONFIGURED


def test_a_full_disk_keeps_nobody_from_setting_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = State(tmp_path)
    (tmp_path / "state.json").symlink_to("/dev/full")
    state.keep("GPU-1", CONFIGURED, SET)

    assert state.settings("GPU-1", CONFIGURED) == SET
    assert "No space left on device" in capsys.readouterr().out
