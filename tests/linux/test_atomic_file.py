"""A file is replaced whole, or nothing has happened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qgpu.linux import atomic_file


def test_a_file_is_there_whole_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "naïve \udcff.txt"
    atomic_file.replace(path, "one")
    atomic_file.replace(path, "two")

    assert path.read_text() == "two"
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_on_the_way_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_file.replace(path, "one")
    with pytest.raises(ZeroDivisionError), atomic_file.replacing(path) as file:
        file.write(b"two" * (1 // 0))

    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_begun_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_file.replacing(tmp_path / "nowhere" / "file"):
        pytest.fail("the block was entered")


def test_a_replaced_file_keeps_its_mode_unless_it_is_given_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(0o600)
    atomic_file.replace(path, "one")
    kept = path.stat().st_mode & 0o777
    atomic_file.replace(path, "two", 0o644)

    assert (kept, path.stat().st_mode & 0o777) == (0o600, 0o644)


def test_a_link_stays_one(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    atomic_file.replace(link, "one")

    assert link.is_symlink()
    assert target.read_text() == "one"


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    atomic_file.replace(link, "gone")

    assert Path("/dev/null").is_char_device()


def test_a_pipe_gets_what_is_written() -> None:
    read, write = os.pipe()
    atomic_file.replace(Path(f"/dev/fd/{write}"), "one")
    os.close(write)

    assert os.read(read, 100) == b"one"
    os.close(read)


@pytest.mark.root
def test_another_users_link_in_a_sticky_directory_is_refused(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "tmp" / "link"
    target.write_text("root's own")
    link.parent.mkdir()
    link.parent.chmod(0o1777)
    link.symlink_to(target)
    os.lchown(link, 54322, 54322)
    with pytest.raises(PermissionError, match="another user"):
        atomic_file.replace(link, "one")

    assert target.read_text() == "root's own"
