"""The seccomp plane under the contract suite, through a guardian of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qgpu.guardian.gpu.gpu import LEASE_NS
from qgpu.ipc.systemd import FdStore
from qgpu.planes.seccomp.host import SeccompHost
from qgpu.planes.seccomp.restored_fds import RestoredFds
from tests.contract.gpu_rig import GpuRig


@contextmanager
def open_rig(directory: Path) -> Iterator[GpuRig]:
    """Give a guardian of its own to a test."""
    rig = GpuRig("seccomp", LEASE_NS, lambda: SeccompHost(RestoredFds(FdStore(), directory)), directory)
    try:
        yield rig
    finally:
        rig.close()
