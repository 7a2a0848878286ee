"""What a pod whose grant allows profiling may ask, for controls whose arguments decide."""

from __future__ import annotations

import struct

from qgpu.guardian.rules import controls
from qgpu.guardian.rules.rows import Why
from qgpu.nvidia import abi

#: Whole-cache flushes that write everything back: of the card's memory, and of system memory. A flush of chosen
#: physical addresses, or one that drops what is not written back, could reach another pod's memory.
_FLUSHES = {abi.FLUSH_WHOLE_CACHE, abi.FLUSH_WHOLE_CACHE | abi.FLUSH_SYSTEM_MEMORY}
#: Controls that RM hands to firmware unread and no header names. ncu asks them with zeros only, and so do pods.
_WITHOUT_ARGUMENTS = {row.number for row in controls.ROWS if row.why is Why.PROFILING and row.firmware}
#: Registers below this one belong to the card's identity, bus and scheduler, and ncu uses none of them. RM's firmware
#: checks each register by a list of its own, but lets number 0 through.
FIRST_REGISTER = 0x9000
_LIST_AT = abi.offsetof("NVB0CC_CTRL_EXEC_REG_OPS_PARAMS", "regOps")
_ENTRY_WORDS = abi.sizeof("NV2080_CTRL_GPU_REG_OP") // 4
_REGISTER_WORD = abi.offsetof("NV2080_CTRL_GPU_REG_OP", "regOffset") // 4


def refuses(command: int, params: bytes | bytearray) -> bool:
    """Tell whether a profiling control is refused for its parameters."""
    if command == abi.NV2080_FB_FLUSH_GPU_CACHE:
        at = abi.offsetof("NV2080_CTRL_FB_FLUSH_GPU_CACHE_PARAMS", "flags")
        return int.from_bytes(params[at : at + 4], "little") not in _FLUSHES
    if command == abi.NVB0CC_EXEC_REG_OPS:
        return _names_other_registers(params)
    return command in _WITHOUT_ARGUMENTS and any(params)


def _names_other_registers(params: bytes | bytearray) -> bool:
    """Tell whether a list of registers names one below FIRST_REGISTER, or is longer than the parameters."""
    count = int.from_bytes(params[:4], "little")
    if _LIST_AT + count * 4 * _ENTRY_WORDS > len(params):
        return True
    words = struct.unpack_from(f"<{count * _ENTRY_WORDS}I", params, _LIST_AT)
    return any(register < FIRST_REGISTER for register in words[_REGISTER_WORD::_ENTRY_WORDS])
