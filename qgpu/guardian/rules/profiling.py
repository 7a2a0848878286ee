"""What a pod whose grant allows profiling may ask, for controls whose arguments decide."""

from __future__ import annotations

from qgpu.guardian.rules import controls
from qgpu.nvidia import abi

#: Whole-cache flushes that write everything back: of the card's memory, and of system memory. A flush of chosen
#: physical addresses, or one that drops what is not written back, could reach another pod's memory.
_FLUSHES = {abi.FLUSH_WHOLE_CACHE, abi.FLUSH_WHOLE_CACHE | abi.FLUSH_SYSTEM_MEMORY}
#: Controls that RM hands to firmware unread and no header names. ncu asks them with zeros only, and so do pods.
_WITHOUT_ARGUMENTS = {row.number for row in controls.ROWS if row.why is controls.PROFILING and row.firmware}


def refuses(command: int, params: bytes | bytearray) -> bool:
    """Tell whether a profiling control is refused for its parameters."""
    if command == abi.NV2080_FB_FLUSH_GPU_CACHE:
        at = abi.offsetof("NV2080_CTRL_FB_FLUSH_GPU_CACHE_PARAMS", "flags")
        return int.from_bytes(params[at : at + 4], "little") not in _FLUSHES
    return command in _WITHOUT_ARGUMENTS and any(params)
