"""The lane on a containerd fails where it cannot run: it is asked for, and green must mean that it has run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import programs

ROOT = Path(__file__).resolve().parents[2]
LANE = ("-m", "pytest", "-p", "no:cacheprovider", "-m", "node", "tests/k8s/containerd")


def lane(**environment: str) -> tuple[int, list[str]]:
    """Run the lane; return its exit code, and the lines in which pytest says why it ended."""
    done = subprocess.run(
        [sys.executable, *LANE],
        cwd=ROOT,
        env=programs.environment(environment),
        capture_output=True,
        text=True,
        timeout=programs.TIMEOUT_S,
        check=False,
    )
    return done.returncode, [line for line in done.stdout.splitlines() if "tests on containerd:" in line]


def test_lane_without_its_programs_fails_and_names_one(tmp_path: Path) -> None:
    code, lines = lane(PATH=str(tmp_path))

    assert code == 1
    (line,) = lines
    assert ("needs runc" if os.geteuid() == 0 else "needs root") in line


@pytest.mark.root
def test_lane_without_its_packages_fails_and_names_them(tmp_path: Path) -> None:
    if any(shutil.which(tool) is None for tool in ("runc", "busybox", "dpkg", "apt-get")):
        pytest.skip("needs runc, busybox, dpkg and apt-get")
    mirror = f"file://{tmp_path}/none"
    code, lines = lane(QGPU_CACHE=str(tmp_path), QGPU_DEBIAN_MIRROR=mirror)

    assert code == 1
    (line,) = lines
    assert f"no packages of containerd from {mirror}" in line
