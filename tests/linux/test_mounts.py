"""A directory in another's place for one child. Needs root."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest

from qgpu.linux import mounts
from qgpu.linux.mounts import seen_at

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def test_only_the_child_sees_a_directory_in_anothers_place(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    for directory in (source, target):
        directory.mkdir()
    (source / "file").write_text("here\n")
    seen = subprocess.run([*seen_at(source, target), "cat", target / "file"], capture_output=True, check=True)
    assert seen.stdout == b"here\n"
    assert not list(target.iterdir())


def test_nobody_follows_a_link_in_what_all_may_write(tmp_path):
    at = tmp_path / "shared"
    (tmp_path / "file").write_text("the host's\n")
    mounts.tmpfs(at, 1 << 20)
    try:
        (at / "link").symlink_to(tmp_path / "file")
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            (at / "link").read_text()
    finally:
        mounts.unmount(at)
