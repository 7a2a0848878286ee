"""What the user-space plane asks of the machine: that it has it alone."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qgpu.errors import AlreadyRunningError
from qgpu.linux import cgroup
from qgpu.planes.seccomp.preflight import lock_host

pytestmark = pytest.mark.root

#: Locks every directory and file that it can open.
GREEDY = """
import fcntl, os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
held = []
for place in sys.argv[1:]:
    for flags in (os.O_RDONLY, os.O_RDWR):
        try:
            held.append(os.open(place, flags))
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pass
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cgroup tree in whose place any file system does, for locks."""
    for directory in (tmp_path, *tmp_path.parents[:-2]):
        directory.chmod(0o755)
    monkeypatch.setattr(cgroup, "mount", lambda: tmp_path)
    return tmp_path


def test_two_daemons_exclude_each_other_across_directories(tree):
    first = lock_host()
    with pytest.raises(AlreadyRunningError):
        lock_host()
    os.close(first)
    os.close(lock_host())


def test_a_user_cannot_hold_the_lock(tree):
    os.close(lock_host())
    places = [str(place) for place in tree.rglob("*")]
    assert places
    with subprocess.Popen(
        [sys.executable, "-c", GREEDY, *places], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == b"there\n"
        os.close(lock_host())
        user.kill()


def test_a_place_that_was_left_open_is_closed_to_users(tree):
    (tree / cgroup.LOCK.lstrip("/")).mkdir(mode=0o755)
    fd = lock_host()

    assert os.fstat(fd).st_mode & 0o777 == 0o700
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
