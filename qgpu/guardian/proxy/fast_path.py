"""The short path for the most frequent call: a control whose parameters are plain data that nothing here tracks.

A starting CUDA program makes two hundred of them. The result is the same as through ``dispatcher.py``, but nothing is
allocated per call: one thread has the buffers, and one system call writes back what changed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from cffi import FFI

from qgpu.guardian.failover.journal import Writes
from qgpu.guardian.rules import controls
from qgpu.linux.seccomp_notify import ProcessMemory
from qgpu.nvidia import abi

#: The one ioctl request that NVIDIA's libraries use for controls.
REQUEST = abi.request(abi.NV_ESC_RM_CONTROL, abi.sizeof("NVOS54_PARAMETERS"))

_MOST_BYTES = 1 << 14
_ARGUMENT_BYTES, _STATUS_AT = abi.sizeof("NVOS54_PARAMETERS"), abi.offsetof("NVOS54_PARAMETERS", "status")

_ffi: Any = FFI()
_ffi.cdef(
    """
    struct iovec { uint64_t base; size_t len; };
    ssize_t process_vm_writev(int pid, const struct iovec *local, unsigned long n, const struct iovec *remote,
                              unsigned long m, unsigned long flags);
    """
)
_libc: Any = _ffi.dlopen(None)


class FastPath:
    """Performs plain controls for one thread of ours."""

    def __init__(self, perform: Any, memory: ProcessMemory, answer: Writes) -> None:
        self._perform = perform
        self._memory = memory
        #: Takes what cannot be written at once.
        self._answer = answer
        self._call = abi.ffi.new("NVOS54_PARAMETERS *")
        self._call_view = abi.ffi.buffer(self._call)
        self._params = _ffi.new("char[]", _MOST_BYTES)
        self._view = _ffi.buffer(self._params)
        self._params_at = int(_ffi.cast("uintptr_t", self._params))
        call_at = int(abi.ffi.cast("uintptr_t", self._call))
        #: The status and the parameters, here and there.
        self._out = _ffi.new("struct iovec[2]", [{"base": call_at + _STATUS_AT, "len": 4}, {"base": self._params_at}])
        self._back = _ffi.new("struct iovec[2]", [{"len": 4}, {}])

    def control(self, tid: int, file: int, argument: int, waits: Callable[[], bool]) -> int | None:
        """Perform a control through ``file``; return an errno, 0 for success, or None if it is not a plain one.

        ``waits`` tells whether the thread still waits in this call. If not, its number may be another process's.
        """
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
            self._view[:size] = before
            call.params = self._params_at
        if error := self._perform(file, REQUEST, call):
            return int(error)
        changed = bool(before) and self._view[:size] != before
        if not changed and call.status == status:
            return 0
        if not waits():
            self._answer.append((argument + _STATUS_AT, bytes(self._call_view[_STATUS_AT : _STATUS_AT + 4])))
            self._answer.extend([(params, bytes(self._view[:size]))] if changed else [])
            return 0
        self._back[0].base = argument + _STATUS_AT
        parts, most = 1, 4
        if changed:
            self._out[1].len = self._back[1].len = size
            self._back[1].base = params
            parts, most = 2, 4 + size
        written = _libc.process_vm_writev(tid, self._out, parts, self._back, parts, 0)
        return 0 if written == most else errno.EFAULT
