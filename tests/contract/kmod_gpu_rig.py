"""The kmod plane under the contract suite on a real GPU, where somebody has loaded the module (make gputest-kmod)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qgpu.daemon.kmod_plane import open_host
from qgpu.planes.kmod import DEVICE
from qgpu.planes.kmod.backend import LEASE_NS
from tests.contract.gpu_rig import GpuRig


@contextmanager
def open_rig(directory: Path) -> Iterator[GpuRig]:
    """Give the module to a test."""
    if not Path(DEVICE).exists():
        pytest.skip(f"no {DEVICE}: make gputest-kmod loads the module")
    rig = GpuRig("kmod", LEASE_NS, open_host, directory)
    try:
        yield rig
    finally:
        rig.close()
