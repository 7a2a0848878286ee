"""The part of UVM's ABI that qgpu reads: ioctls of /dev/nvidia-uvm (kernel-open/nvidia-uvm/uvm_ioctl.h).

Their numbers are plain integers: no type, no direction, no size. Every structure ends with UVM's status.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

INITIALIZE = 0x30000001
REGISTER_GPU_VASPACE, REGISTER_CHANNEL, UNREGISTER_CHANNEL = 25, 27, 28
MAP_EXTERNAL_ALLOCATION = 33
FREE = 34
REGISTER_GPU = 37
UNREGISTER_GPU = 38
MAP_DYNAMIC_PARALLELISM_REGION = 65
UNMAP_EXTERNAL = 66
ALLOC_SEMAPHORE_POOL = 68
VALIDATE_VA_RANGE = 72
MAP_EXTERNAL_SPARSE = 74
ALLOC_DEVICE_P2P = 78
#: By these UVM maps memory that RM made.
KERNEL_MAPPINGS = frozenset({MAP_EXTERNAL_ALLOCATION, ALLOC_DEVICE_P2P})

#: Calls that map no card memory, but take page tables on the card.
TABLES_ALONE = frozenset({MAP_DYNAMIC_PARALLELISM_REGION, ALLOC_SEMAPHORE_POOL, MAP_EXTERNAL_SPARSE})
#: By these UVM begins to record events, on a file of /dev/nvidia-uvm-tools; the second one is new in branch 555.
TOOLS_INIT_EVENT_TRACKER, TOOLS_INIT_EVENT_TRACKER_V2 = 56, 76
TRACKERS = frozenset({TOOLS_INIT_EVENT_TRACKER, TOOLS_INIT_EVENT_TRACKER_V2})
#: Calls that decide which cards hold which memory, or whom UVM tells of events.
WATCHED = frozenset(
    {
        *(INITIALIZE, MAP_EXTERNAL_ALLOCATION, FREE, REGISTER_GPU, UNMAP_EXTERNAL),
        *(ALLOC_DEVICE_P2P, REGISTER_GPU_VASPACE, REGISTER_CHANNEL, *TABLES_ALONE, *TRACKERS),
    }
)

INIT_FLAGS_DISABLE_HMM = 0x1
INITIALIZE_BYTES = 16
STATUS_AT_INITIALIZE = 8

#: MAP_EXTERNAL_ALLOCATION has attributes for 32 cards, and since 550.40.53 for 256, of 36 bytes each.
_ATTRIBUTES_BYTES, _FEW, _MANY = 36, 32, 256
_MANY_SINCE = (550, 40, 53)
#: UNREGISTER_CHANNEL names the card before the channel, and FREE the length, but no longer since 590.
_SHORTER_SINCE = (590,)

BASE_AND_LENGTH = struct.Struct("<QQ")
CLIENT_AND_OBJECT = struct.Struct("<II")
UUID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in a call's structure; the object's handle follows ``client_at``."""

    size: int
    status_at: int
    client_at: int | None = None


def layouts(version: str) -> dict[int, Layout]:
    """Return the calls' layouts in a driver version such as "580.159.04"."""
    parts = tuple(int(part) for part in version.split("."))
    attributes = _ATTRIBUTES_BYTES * (_MANY if parts >= _MANY_SINCE else _FEW)
    shorter = parts >= _SHORTER_SINCE
    channel_at = 0 if shorter else UUID_BYTES
    # base, length, offset; the attributes; their count; a descriptor, client, memory, status
    status_at = (24 + attributes + 7) // 8 * 8 + 8 + 12
    return {
        MAP_EXTERNAL_ALLOCATION: Layout(status_at + 4, status_at, status_at - 8),
        FREE: Layout(16, 8) if shorter else Layout(24, 16),
        VALIDATE_VA_RANGE: Layout(24, 16),
        UNMAP_EXTERNAL: Layout(40, 32),
        REGISTER_GPU: Layout(40, 36),
        REGISTER_GPU_VASPACE: Layout(32, 28),
        UNREGISTER_CHANNEL: Layout(channel_at + 12, channel_at + 8, channel_at),
        MAP_DYNAMIC_PARALLELISM_REGION: Layout(40, 32),
        MAP_EXTERNAL_SPARSE: Layout(40, 32),
        # base, length; the attributes; their count; status
        ALLOC_SEMAPHORE_POOL: Layout((16 + attributes + 7) // 8 * 8 + 16, (16 + attributes + 7) // 8 * 8 + 8),
    }


def major(devices: str | None = None) -> int | None:
    """Find the major number of /dev/nvidia-uvm, which differs from boot to boot; None if UVM is not loaded."""
    text = Path("/proc/devices").read_text() if devices is None else devices
    for line in text.splitlines():
        number, _, name = line.strip().partition(" ")
        if name == "nvidia-uvm":
            return int(number)
    return None
