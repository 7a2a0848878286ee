"""The check of the state directory: what cannot be written, is full or ends with a reboot is found, with a remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qgpu.doctor.report import Verdict
from qgpu.doctor.state_directory import check_state_directory

#: Fields of statvfs by their place.
BLOCKS_FREE, FILES_FREE, FLAGS = 4, 7, 8


def mounted(directory: Path, kind: str) -> Path:
    """Write a mountinfo in which the directory's file system is of this kind."""
    device = directory.stat().st_dev
    file = directory.parent / "mountinfo"
    other = "21 1 0:0 / /elsewhere rw - proc proc rw\n"
    file.write_text(f"{other}22 1 {os.major(device)}:{os.minor(device)} / / rw,relatime shared:1 - {kind} none rw\n")
    return file


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory of the test's own."""
    made = tmp_path / "state"
    made.mkdir()
    return made


def test_a_directory_on_a_disk_with_room_is_ok(directory: Path) -> None:
    check = check_state_directory(directory, mounted(directory, "ext4"))

    assert check.verdict is Verdict.OK
    assert check.found.startswith(f"{directory}, ")
    assert check.found.endswith(" free")


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_a_directory_that_a_reboot_empties_is_a_warning(directory: Path, kind: str) -> None:
    check = check_state_directory(directory, mounted(directory, kind))

    assert (check.verdict, check.found) == (Verdict.WARN, f"{directory}: a {kind}, which a reboot empties")
    assert "--state-dir" in check.remedy


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        (FLAGS, os.ST_RDONLY, "cannot be written"),
        (BLOCKS_FREE, 0, "only 0 B free"),
        (FILES_FREE, 0, "no file can be made"),
    ],
)
def test_a_directory_that_takes_no_file_fails(
    directory: Path, monkeypatch: pytest.MonkeyPatch, field: int, value: int, found: str
) -> None:
    fields = [4096, 4096, 1 << 20, 1 << 20, 1 << 20, 1000, 1000, 1000, 0, 255]
    fields[field] = value
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(fields))
    check = check_state_directory(directory, mounted(directory, "ext4"))

    assert check.verdict is Verdict.FAIL
    assert check.found == f"{directory}: {found}, so settings cannot change"
    assert "--state-dir" in check.remedy


def test_a_directory_that_is_gone_fails(directory: Path) -> None:
    directory.rmdir()
    check = check_state_directory(directory)

    assert (check.verdict, check.remedy) == (Verdict.FAIL, "restart qgpud")


def test_a_daemon_that_keeps_nothing_is_a_warning() -> None:
    check = check_state_directory(None)

    assert (check.verdict, check.found) == (Verdict.WARN, "none: settings and events end with qgpud")
