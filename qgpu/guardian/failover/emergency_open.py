"""Opens every gate with only a journal and an RM client, while the next guardian is still loading."""

from __future__ import annotations

from contextlib import closing

import structlog

from qgpu.errors import QgpuError
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.gpu.gpu_ops import GpuOps
from qgpu.nvidia import abi
from qgpu.nvidia.rm_client import RmClient
from qgpu.nvidia.rm_device import open_devices
from qgpu.nvidia.versions import find, installed

_log = structlog.get_logger("guardian")

#: How lines begin that are about no channel, and what they contain if they are about an object of memory.
_OTHERS = b"map unmap unmapped kept carrier managed untracked shared notes event unnamed dma_mappings cpu_mappings"
_OF_OTHERS = tuple(b'{"fact":"%s"' % kind for kind in _OTHERS.split())
_MEMORY_CLASS = b'"class":%d,' % abi.NV01_MEMORY_LOCAL_USER


def open_gates(journal_fd: int) -> None:
    """Open the gates of all pods in a journal; if that fails, the next guardian opens them."""
    try:
        table = ObjectTable()
        for fact in Journal(journal_fd).read(_is_of_channels)[1]:
            table.note(fact)
        with closing(RmClient()) as client:
            devices = open_devices(client)
            gpu_ops = GpuOps(table, find(installed()), client, devices)
            for device in devices:
                gpu_ops.open_gates(device)
    except (QgpuError, OSError) as error:
        _log.warning("gates unchanged until a guardian runs", reason=str(error))


def _is_of_channels(line: bytes) -> bool:
    """Tell whether a line of a journal may be about channels or what is above them. Pods have fewer of these."""
    return not line.startswith(_OF_OTHERS) and _MEMORY_CLASS not in line
