"""The runtime directory: whoever's it is, it is the daemon's own."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from qgpu.daemon.runtime_dir import hold
from qgpu.errors import AlreadyRunningError, ExitCode, InvalidValueError, PermissionDeniedError, QgpuError


def test_one_daemon_holds_it_at_a_time(tmp_path: Path) -> None:
    held = hold(tmp_path / "run")
    with pytest.raises(AlreadyRunningError):
        hold(tmp_path / "run")
    os.close(held)
    os.close(hold(tmp_path / "run"))


def test_nobody_else_can_open_what_it_locks(tmp_path: Path) -> None:
    os.close(hold(tmp_path / "run"))

    assert (tmp_path / "run/qgpud.lock").stat().st_mode & 0o777 == 0o600


@pytest.mark.root
def test_a_directory_behind_another_users_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "own")
    os.close(hold(tmp_path / "run"))
    os.lchown(tmp_path / "run", 65534, 65534)
    with pytest.raises(PermissionDeniedError, match="belongs to another user"):
        hold(tmp_path / "run")


@pytest.mark.parametrize(("path", "why"), [("/proc/nope", "No such file"), ("/etc/passwd", "Not a directory")])
def test_a_place_for_no_directory_is_no_lack_of_permission(path: str, why: str) -> None:
    with pytest.raises(InvalidValueError, match=f"^{path}: {why}.*; choose another --runtime-dir"):
        hold(Path(path))


def test_a_full_disk_is_no_lack_of_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(QgpuError, match="free some space there") as caught:
        hold(tmp_path / "run")

    assert caught.value.code is ExitCode.FAILED  # systemd starts it again
