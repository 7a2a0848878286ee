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


ROWS = (
    Escape(abi.NV_ESC_RM_ALLOC_MEMORY, "NV_ESC_RM_ALLOC_MEMORY", (abi.sizeof("NVOS02_PARAMETERS_WITH_FD"),)),
    Escape(abi.NV_ESC_RM_ALLOC_OBJECT, "NV_ESC_RM_ALLOC_OBJECT", (abi.sizeof("NVOS05_PARAMETERS"),)),
    Escape(abi.NV_ESC_RM_FREE, "NV_ESC_RM_FREE", (abi.sizeof("NVOS00_PARAMETERS"),)),
    Escape(abi.NV_ESC_RM_CONTROL, "NV_ESC_RM_CONTROL", (abi.sizeof("NVOS54_PARAMETERS"),)),
    Escape(abi.NV_ESC_RM_ALLOC, "NV_ESC_RM_ALLOC", (abi.sizeof("NVOS21_PARAMETERS"), abi.sizeof("NVOS64_PARAMETERS"))),
    Escape(abi.NV_ESC_RM_DUP_OBJECT, "NV_ESC_RM_DUP_OBJECT", (abi.sizeof("NVOS55_PARAMETERS"),)),
    Escape(abi.NV_ESC_RM_VID_HEAP_CONTROL, "NV_ESC_RM_VID_HEAP_CONTROL", (abi.sizeof("NVOS32_PARAMETERS"),)),
    # RM checks neither whose object is shared, nor whose client's registry it reads.
    Escape(abi.NV_ESC_RM_SHARE, "NV_ESC_RM_SHARE", (abi.sizeof("NVOS57_PARAMETERS"),)),
    Escape(abi.NV_ESC_RM_I2C_ACCESS, "NV_ESC_RM_I2C_ACCESS", (abi.I2C_ACCESS_BYTES,), refused=Refused.ALWAYS),
    Escape(abi.NV_ESC_RM_IDLE_CHANNELS, "NV_ESC_RM_IDLE_CHANNELS", (abi.IDLE_CHANNELS_BYTES,), refused=Refused.ALWAYS),
    Escape(
        abi.NV_ESC_RM_ACCESS_REGISTRY,
        "NV_ESC_RM_ACCESS_REGISTRY",
        (abi.ACCESS_REGISTRY_BYTES,),
        refused=Refused.ALWAYS,
    ),
    Escape(abi.NV_ESC_RM_MAP_MEMORY, "NV_ESC_RM_MAP_MEMORY", (abi.sizeof("NVOS33_PARAMETERS_WITH_FD"),)),
    Escape(abi.NV_ESC_RM_UNMAP_MEMORY, "NV_ESC_RM_UNMAP_MEMORY", (abi.sizeof("NVOS34_PARAMETERS"),)),
    Escape(
        abi.NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO,
        "NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO",
        (abi.sizeof("NVOS56_PARAMETERS"),),
    ),
    Escape(abi.NV_ESC_REGISTER_FD, "NV_ESC_REGISTER_FD", (4,)),
    Escape(
        abi.NV_ESC_RM_ALLOC_CONTEXT_DMA2,
        "NV_ESC_RM_ALLOC_CONTEXT_DMA2",
        (abi.sizeof("NVOS39_PARAMETERS"),),
        in_module=Refused.ALWAYS,  # only graphics asks for it
    ),
    Escape(
        abi.NV_ESC_RM_BIND_CONTEXT_DMA,
        "NV_ESC_RM_BIND_CONTEXT_DMA",
        (abi.BIND_CONTEXT_DMA_BYTES,),
        refused=Refused.ALWAYS,
    ),
    Escape(abi.NV_ESC_ATTACH_GPUS_TO_FD, "NV_ESC_ATTACH_GPUS_TO_FD", (), in_module=Refused.ALWAYS),  # likewise
    Escape(abi.NV_ESC_ALLOC_OS_EVENT, "NV_ESC_ALLOC_OS_EVENT", (abi.sizeof("nv_ioctl_os_event_t"),)),
    Escape(abi.NV_ESC_FREE_OS_EVENT, "NV_ESC_FREE_OS_EVENT", (abi.sizeof("nv_ioctl_os_event_t"),)),
    Escape(abi.NV_ESC_IOCTL_XFER_CMD, "NV_ESC_IOCTL_XFER_CMD", (abi.sizeof("nv_ioctl_xfer_t"),)),
    Escape(
        abi.NV_ESC_EXPORT_TO_DMABUF_FD,
        "NV_ESC_EXPORT_TO_DMABUF_FD",
        abi.EXPORT_TO_DMABUF_FD_BYTES,
        refused=Refused.UNDER_LIMIT,
        in_module=Refused.ALWAYS,
    ),
    Escape(
        abi.NV_ESC_RM_MAP_MEMORY_DMA,
        "NV_ESC_RM_MAP_MEMORY_DMA",
        tuple(abi.MAP_MEMORY_DMA),
        refused=Refused.UNDER_LIMIT,
    ),
    Escape(abi.NV_ESC_RM_UNMAP_MEMORY_DMA, "NV_ESC_RM_UNMAP_MEMORY_DMA", tuple(abi.UNMAP_MEMORY_DMA)),
)

#: The calls that the seccomp filters intercept: (number, bytes).
WATCHED = frozenset((row.number, size) for row in ROWS for size in row.sizes)
#: And those that they intercept in any size.
WATCHED_NUMBERS = frozenset(row.number for row in ROWS if not row.sizes)

#: Those of them that map memory for the CPU.
MAPPINGS = frozenset({abi.NV_ESC_RM_MAP_MEMORY, abi.NV_ESC_RM_UNMAP_MEMORY, abi.NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO})

_NAMES = {row.number: row.name for row in ROWS}


def name(number: int) -> str:
    """Return the name under which an escape is counted."""
    return _NAMES.get(number, f"escape {number:#x}")
