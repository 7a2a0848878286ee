"""The state directory: one daemon keeps its settings there, and an error says what to do."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from qgpu.config import GpuSettings
from qgpu.daemon.settings_file import SettingsFile
from qgpu.errors import AlreadyRunningError, ExitCode, InvalidValueError, QgpuError
from qgpu.linux import atomic_file


def failing(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def test_one_daemon_keeps_settings_there_at_a_time(tmp_path: Path) -> None:
    first = SettingsFile(tmp_path)
    first.hold()
    with pytest.raises(AlreadyRunningError, match="another qgpud keeps its settings there"):
        SettingsFile(tmp_path).hold()
    first.close()
    second = SettingsFile(tmp_path)
    second.hold()
    second.close()


def test_another_users_lock_keeps_no_daemon_from_starting(tmp_path: Path) -> None:
    """A user who may only read the directory can lock the directory, but cannot open a file in it."""
    theirs = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(theirs, fcntl.LOCK_SH)
    state = SettingsFile(tmp_path)
    state.hold()
    files = list(tmp_path.iterdir())
    state.close()
    os.close(theirs)

    assert files
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_no_daemon_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise failing(number)

    state = SettingsFile(tmp_path)
    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr(os, "open", refuse)
        state.hold()
    state.close()

    assert [line["event"] for line in logs] == ["state directory cannot be written: settings cannot change"]


def test_a_lock_that_cannot_be_opened_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "state.lock").symlink_to("elsewhere")
    with pytest.raises(InvalidValueError, match=r"state\.lock: .*; choose another --state-dir"):
        SettingsFile(tmp_path).hold()

    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("writable", [True, False])
def test_a_read_only_directory_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: writable)
    state = SettingsFile(tmp_path)
    with capture_logs() as logs:
        state.hold()
    state.close()

    told = ["state directory cannot be written: settings cannot change"]
    assert [line["event"] for line in logs] == ([] if writable else told)


@pytest.mark.parametrize(
    ("number", "code", "remedy"),
    [
        (errno.ENOSPC, ExitCode.FAILED, "free some space there"),
        (errno.EROFS, ExitCode.NO_PERMISSION, "choose another --state-dir"),
    ],
)
def test_a_directory_that_cannot_be_made_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: ExitCode, remedy: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise failing(number)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(QgpuError, match=remedy) as caught:
        SettingsFile(tmp_path / "state")

    assert caught.value.code is code


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "free some space there"), (errno.EROFS, "qgpud must be able to write there")]
)
def test_a_setting_that_cannot_be_kept_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise failing(number)

    state, configured = SettingsFile(tmp_path), GpuSettings()
    changed = GpuSettings(period_ns=2 * configured.period_ns)
    monkeypatch.setattr(atomic_file, "replace", refuse)
    with pytest.raises(QgpuError, match=remedy):
        state.keep("GPU-1", configured, changed)

    assert state.settings("GPU-1", configured) == configured
