"""Fixtures of the container suite: module, simulated driver and daemon. Outside the VM nothing here is collected.

Run it as ``tests/vm/lane.py tests/vm/containers``. podman, runc and crun are this machine's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "guest"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
collect_ignore_glob = [] if os.environ.get("QGPU_VM_BUILD") and not os.environ.get("QGPU_VM_REAL") else ["test_*.py"]

if not collect_ignore_glob:
    import engine
    import qg


@pytest.fixture(scope="session")
def driver() -> Iterator[None]:
    with qg.driver():
        qg.insmod("qgpu.ko")
        engine.make_rootfs()
        yield
        qg.rmmod("qgpu")


@pytest.fixture
def daemon(driver: None) -> Iterator[engine.Daemon]:
    """A daemon, and afterwards no pods."""
    running = engine.Daemon()
    yield running
    if running.process.poll() is not None:
        running.start()
    qg.until(lambda: not running.pods(), 60)
    running.stop()


@pytest.fixture(params=["runc", "crun"])
def podman(request: pytest.FixtureRequest, daemon: engine.Daemon) -> Iterator[engine.Podman]:
    """Podman with each runtime; its containers end with the test."""
    made = engine.Podman(request.param)
    yield made
    made.end()
