"""A guardian in reserve: a process that has everything loaded and does nothing until it is told to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qgpu.guardian.journal import Journal


@pytest.fixture
def reserve(tmp_path):
    journal = Journal()
    process = subprocess.Popen(
        [sys.executable, "-m", "qgpu.guardian", str(tmp_path), str(journal.fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[journal.fd],
    )
    yield process
    process.kill()
    process.communicate()
    os.close(journal.fd)


def test_one_that_nobody_tells_to_begin_ends_without_a_word(reserve):
    said, _ = reserve.communicate(timeout=60)

    assert (said, reserve.returncode) == (b"", 0)


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="there is a driver here")
def test_one_that_is_told_to_begin_says_what_it_lacks(reserve):
    said, _ = reserve.communicate(b"begin\n", timeout=60)

    assert said.decode().startswith(f"{reserve.returncode} /proc/driver/nvidia/version: ")
