"""Looks for what tests on a containerd need. They run only when asked for (-m node), and fail where it is missing.

A lane whose tests skip themselves would be green without having tried anything.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tests import debian
from tests.k8s.containerd import engine


def check(**fetches: Callable[[], object]) -> None:
    """End the run with one line if a program is missing here, or if something to fetch cannot be had, by name."""
    if why := engine.missing():
        pytest.exit(f"tests on containerd: this machine {why}", returncode=1)
    for name, fetch in fetches.items():
        try:
            fetch()
        except subprocess.CalledProcessError as error:
            pytest.exit(
                f"tests on containerd: no packages of {name} from {debian.MIRROR}: {error.cmd[0]} ended with "
                f"{error.returncode}; QGPU_DEBIAN_MIRROR names another mirror",
                returncode=1,
            )
