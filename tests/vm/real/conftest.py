"""Fixtures of the real-driver suite: NVIDIA's own nvidia.ko on a made-up PCI device. Outside that VM, nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "guest"))
collect_ignore_glob = [] if os.environ.get("QGPU_VM_REAL") else ["test_*.py"]

if not collect_ignore_glob:
    import qg


@pytest.fixture(scope="session", autouse=True)
def _driver() -> Iterator[None]:
    qg.insmod("fakepci.ko")
    with qg.driver():
        yield
    qg.rmmod("fakepci")


@pytest.fixture(scope="session")
def figure() -> Callable[[str, float], None]:
    return qg.note
