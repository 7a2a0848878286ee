"""Opens every gate with only a journal and an RM client, while the next guardian is still loading."""

from __future__ import annotations

import structlog

from qgpu.errors import QgpuError
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.gpu.gpu_ops import GpuOps
from qgpu.nvidia.rm_client import RmClient
from qgpu.nvidia.rm_device import open_devices
from qgpu.nvidia.versions import find, installed

_log = structlog.get_logger("guardian")


def open_gates(journal_fd: int) -> None:
    """Open the gates of all pods in a journal; if that fails, the next guardian opens them."""
    try:
        table = ObjectTable()
        for fact in Journal(journal_fd).read()[1]:
            table.note(fact)
        client = RmClient()
        try:
            devices = open_devices(client)
            gpu_ops = GpuOps(table, find(installed()), client, devices)
            for device in devices:
                gpu_ops.open_gates(device)
        finally:
            client.close()
    except (QgpuError, OSError) as error:
        _log.warning("gates unchanged until a guardian runs", reason=str(error))
