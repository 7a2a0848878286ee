"""A lock that only processes of its owner can take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qgpu.linux import lock_file


def test_a_lock_is_held_until_its_descriptor_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = lock_file.lock(path)
    with pytest.raises(BlockingIOError):
        lock_file.lock(path)
    os.close(held)
    os.close(lock_file.lock(path))


@pytest.mark.parametrize("mode", [None, 0o644, 0o666])
def test_nobody_else_may_open_it(tmp_path: Path, mode: int | None) -> None:
    path = tmp_path / "lock"
    if mode is not None:  # of an earlier version
        path.touch()
        path.chmod(mode)
    os.close(lock_file.lock(path))

    assert path.stat().st_mode & 0o777 == 0o600


def test_what_a_link_names_is_not_locked(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="Too many levels"):
        lock_file.lock(tmp_path / "lock")

    assert not (tmp_path / "other").exists()


def test_a_lock_that_is_refused_leaves_no_descriptor(tmp_path: Path) -> None:
    held, before = lock_file.lock(tmp_path / "lock"), len(os.listdir("/proc/self/fd"))
    with pytest.raises(BlockingIOError):
        lock_file.lock(tmp_path / "lock")

    assert len(os.listdir("/proc/self/fd")) == before
    os.close(held)
