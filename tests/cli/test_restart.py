"""What outlives a daemon: its control socket in the service manager's store, and what was set at run time."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from qgpu.config import GpuSettings
from qgpu.daemon.settings_file import SettingsFile
from qgpu.errors import ExitCode, QgpuError
from qgpu.ipc.control_socket import Client
from tests import pasting
from tests.cli import programs
from tests.cli.manager import Manager
from tests.cli.programs import TIMEOUT_S, qgpuctl
from tests.pasting import Terminal

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

    assert (result.returncode, len(result.stderr.splitlines())) == (ExitCode.USAGE, 1)
    assert "--state-dir" in result.stderr


def test_changed_configuration_overrides_kept_settings(tmp_path: Path) -> None:
    SettingsFile(tmp_path).keep("GPU-1", CONFIGURED, SET)

    assert SettingsFile(tmp_path).settings("GPU-1", CONFIGURED) == SET
    assert SettingsFile(tmp_path).settings("GPU-2", CONFIGURED) == CONFIGURED
    changed = GpuSettings(policy="best-effort")
    assert SettingsFile(tmp_path).settings("GPU-1", changed) == changed


def test_setting_what_is_configured_leaves_nothing_behind(tmp_path: Path) -> None:
    state = SettingsFile(tmp_path)
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
    state = SettingsFile(tmp_path)

    assert state.settings("GPU-1", CONFIGURED) == CONFIGURED
    assert len(capsys.readouterr().out.splitlines()) == 1
    state.keep("GPU-1", CONFIGURED, SET)
    assert SettingsFile(tmp_path).settings("GPU-1", CONFIGURED) == SET


def test_a_state_file_that_is_not_text_is_one_line_too(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes(b"\xff\xfe")

    assert SettingsFile(tmp_path).settings("GPU-1", CONFIGURED) == CONFIGURED


def test_a_setting_that_cannot_be_kept_is_not_made(tmp_path: Path) -> None:
    state = SettingsFile(tmp_path)
    (tmp_path / "state.json").symlink_to("/dev/full")
    with pytest.raises(QgpuError, match="No space left on device; nothing was changed"):
        state.keep("GPU-1", CONFIGURED, SET)

    assert state.settings("GPU-1", CONFIGURED) == CONFIGURED


def test_the_daemon_survives_sighup(tmp_path: Path) -> None:
    with programs.daemon(tmp_path) as running:
        running.process.send_signal(signal.SIGHUP)

        assert "SIGHUP ignored; restart qgpud" in running.line()
        assert running.ctl("status").returncode == ExitCode.OK


def test_a_daemon_ends_with_the_terminal_that_started_it(tmp_path: Path) -> None:
    pasting.programs(tmp_path / "bin")
    terminal = Terminal(tmp_path, programs.environment({"PYTHONPATH": os.getcwd()}))
    terminal.keys("bin/qgpud --plane sim --runtime-dir run & echo pid' '$!,\n")
    terminal.until("ready")
    pid = int(terminal.shown.rpartition("pid ")[2].partition(",")[0])
    process = os.pidfd_open(pid)
    terminal.close()

    assert select.select([process], [], [], TIMEOUT_S)[0], "it runs on without its terminal"
    os.close(process)


@pytest.mark.parametrize("lost", ["run", "run/qgpud.sock"])
def test_a_removed_runtime_directory_is_made_again(tmp_path: Path, lost: str) -> None:
    with programs.daemon(tmp_path / "run") as running:
        found = tmp_path / lost
        shutil.rmtree(found) if found.is_dir() else found.unlink()

        assert running.ctl("status").returncode == ExitCode.OK
        second = programs.qgpud("--plane", "sim", "--runtime-dir", str(tmp_path / "run"))
        assert second.returncode == ExitCode.ALREADY_RUNNING
        assert "socket removed: listening again" in running.line()
