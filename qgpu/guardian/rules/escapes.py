"""The escapes of RM that the guardian checks: calls that create, free, share, map or control objects, and the wrapper.

RM looks only at an escape's number and size (escape.c:RmIoctl), and ignores a call of another size. The kernel
continues all other escapes in the pod itself, on the pod's own files.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from qgpu.nvidia import abi


class Refused(enum.Enum):
    """When an escape is refused regardless of its arguments."""

    ALWAYS = enum.auto()
    #: It takes card memory that cannot be counted, so a pod with a memory limit may not use it.
    UNDER_LIMIT = enum.auto()


class Escape(NamedTuple):
    """One escape of RM, in all its sizes."""

    number: int
    name: str
    #: In bytes; none: the driver takes any.
    sizes: tuple[int, ...]
    refused: Refused | None = None
    #: When the kernel module refuses it, where it cannot do what the guardian does.
    in_module: Refused | None = None


def _row(name: str, *sizes: str | int, refused: Refused | None = None, in_module: Refused | None = None) -> Escape:
    """Make the row of an escape of ``abi.py``, given its structures, or their sizes where those are not declared."""
    in_bytes = tuple(abi.sizeof(size) if isinstance(size, str) else size for size in sizes)
    return Escape(getattr(abi, name), name, in_bytes, refused, in_module)


_ALWAYS, _UNDER_LIMIT = Refused.ALWAYS, Refused.UNDER_LIMIT

ROWS = (
    _row("NV_ESC_RM_ALLOC_MEMORY", "NVOS02_PARAMETERS_WITH_FD"),
    _row("NV_ESC_RM_ALLOC_OBJECT", "NVOS05_PARAMETERS"),
    _row("NV_ESC_RM_FREE", "NVOS00_PARAMETERS"),
    _row("NV_ESC_RM_CONTROL", "NVOS54_PARAMETERS"),
    _row("NV_ESC_RM_ALLOC", "NVOS21_PARAMETERS", "NVOS64_PARAMETERS"),
    _row("NV_ESC_RM_DUP_OBJECT", "NVOS55_PARAMETERS"),
    _row("NV_ESC_RM_VID_HEAP_CONTROL", "NVOS32_PARAMETERS"),
    # RM checks neither whose object is shared, nor whose client's registry it reads.
    _row("NV_ESC_RM_SHARE", "NVOS57_PARAMETERS"),
    _row("NV_ESC_RM_I2C_ACCESS", abi.I2C_ACCESS_BYTES, refused=_ALWAYS),
    _row("NV_ESC_RM_IDLE_CHANNELS", abi.IDLE_CHANNELS_BYTES, refused=_ALWAYS),
    _row("NV_ESC_RM_ACCESS_REGISTRY", abi.ACCESS_REGISTRY_BYTES, refused=_ALWAYS),
    _row("NV_ESC_RM_MAP_MEMORY", "NVOS33_PARAMETERS_WITH_FD"),
    _row("NV_ESC_RM_UNMAP_MEMORY", "NVOS34_PARAMETERS"),
    _row("NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO", "NVOS56_PARAMETERS"),
    _row("NV_ESC_REGISTER_FD", 4),
    _row("NV_ESC_RM_ALLOC_CONTEXT_DMA2", "NVOS39_PARAMETERS", in_module=_ALWAYS),  # only graphics asks for it
    _row("NV_ESC_RM_BIND_CONTEXT_DMA", abi.BIND_CONTEXT_DMA_BYTES, refused=_ALWAYS),
    _row("NV_ESC_ATTACH_GPUS_TO_FD", in_module=_ALWAYS),  # likewise
    _row("NV_ESC_ALLOC_OS_EVENT", "nv_ioctl_os_event_t"),
    _row("NV_ESC_FREE_OS_EVENT", "nv_ioctl_os_event_t"),
    _row("NV_ESC_IOCTL_XFER_CMD", "nv_ioctl_xfer_t"),
    _row("NV_ESC_EXPORT_TO_DMABUF_FD", *abi.EXPORT_TO_DMABUF_FD_BYTES, refused=_UNDER_LIMIT, in_module=_ALWAYS),
    _row("NV_ESC_RM_MAP_MEMORY_DMA", *abi.MAP_MEMORY_DMA, refused=_UNDER_LIMIT),
    _row("NV_ESC_RM_UNMAP_MEMORY_DMA", *abi.UNMAP_MEMORY_DMA),
)

#: The calls that the seccomp filters intercept: (number, bytes).
WATCHED = frozenset((row.number, size) for row in ROWS for size in row.sizes)
#: And those that they intercept in any size.
WATCHED_NUMBERS = frozenset(row.number for row in ROWS if not row.sizes)

#: Those that a pod with a memory limit may not use.
UNDER_LIMIT = frozenset(row.number for row in ROWS if row.refused is Refused.UNDER_LIMIT)

#: Those of them that map memory for the CPU.
MAPPINGS = frozenset({abi.NV_ESC_RM_MAP_MEMORY, abi.NV_ESC_RM_UNMAP_MEMORY, abi.NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO})

_NAMES = {row.number: row.name for row in ROWS}


def name(number: int) -> str:
    """Return the name under which an escape is counted."""
    return _NAMES.get(number, f"escape {number:#x}")
