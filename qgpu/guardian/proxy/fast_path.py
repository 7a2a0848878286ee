"""The short path for the most frequent call: a control whose parameters are plain data that nothing here tracks.

A starting CUDA program makes two hundred of them. The result is the same as through ``control_calls.py``, but the
buffers are not made anew for each call: one thread has them.
"""

from __future__ import annotations

from typing import Any

from qgpu.guardian.failover.journal import Writes
from qgpu.guardian.rules import controls
from qgpu.linux.seccomp_notify import ProcessMemory
from qgpu.nvidia import abi
from qgpu.nvidia.abi import ffi

#: The one ioctl request that NVIDIA's libraries use for controls.
REQUEST = abi.request(abi.NV_ESC_RM_CONTROL, abi.sizeof("NVOS54_PARAMETERS"))

_MOST_BYTES = 1 << 14
_ARGUMENT_BYTES, _STATUS_AT = abi.sizeof("NVOS54_PARAMETERS"), abi.offsetof("NVOS54_PARAMETERS", "status")


class FastPath:
    """Performs plain controls for one thread of ours."""

    def __init__(self, perform: Any, memory: ProcessMemory, answer: Writes) -> None:
        self._perform, self._memory, self._answer = perform, memory, answer
        self._call, self._params = ffi.new("NVOS54_PARAMETERS *"), ffi.new("char[]", _MOST_BYTES)
        self._call_view, self._params_view = ffi.buffer(self._call), ffi.buffer(self._params)
        self._params_at = int(ffi.cast("uintptr_t", self._params))

    def control(self, tid: int, file: int, argument: int) -> int | None:
        """Perform a control through ``file``; return an errno, 0 for success, or None if it is not a plain one."""
        call = self._call
        if (data := self._memory.read(tid, argument, _ARGUMENT_BYTES)) is None:
            return None
        self._call_view[:] = data
        size, params, status = call.paramsSize, call.params, call.status
        if call.cmd not in controls.PLAIN or call.flags & abi.NVOS54_FLAGS_SERIALIZED or size > _MOST_BYTES:
            return None
        before: bytes | None = b""
        if params and size:
            if (before := self._memory.read(tid, params, size)) is None:
                return None
            self._params_view[:size] = before
            call.params = self._params_at
        if error := self._perform(file, REQUEST, call):
            return int(error)
        if call.status != status:
            self._answer.append((argument + _STATUS_AT, self._call_view[_STATUS_AT : _STATUS_AT + 4]))
        if before and (after := self._params_view[:size]) != before:
            self._answer.append((params, after))
        return 0
