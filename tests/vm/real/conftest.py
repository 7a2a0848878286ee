"""Fixtures of the real-driver suite: NVIDIA's own modules on made-up PCI devices. Outside that VM, nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "guest")]
collect_ignore_glob = [] if os.environ.get("QGPU_VM_REAL") else ["test_*.py"]

if not collect_ignore_glob:
    import modules
    import qg


@pytest.fixture(scope="session", autouse=True)
def _driver() -> Iterator[None]:
    qg.insmod("fakepci.ko", f"memory={os.environ['QGPU_VM_CARD']}")
    with qg.driver():
        yield
    qg.rmmod("fakepci")


@pytest.fixture(scope="session")
def figure() -> Callable[[str, float], None]:
    return qg.note


@pytest.fixture
def qgpu() -> Iterator[qg.Qgpu]:
    """Open the module; it is unloaded after the test."""
    modules.load()
    opened = qg.Qgpu()
    yield opened
    opened.close()
    modules.unload()


@pytest.fixture
def web(qgpu: qg.Qgpu) -> Iterator[qg.Pod]:
    """Make a pod; nothing of it may be left after the test."""
    made = qg.Pod(qgpu, "web")
    yield made
    made.close()
    qg.until(lambda: qgpu.info().nr_clients == 0)
    assert qgpu.info().nr_objects == 0
