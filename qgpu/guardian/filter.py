"""The seccomp filter of a pod: which system calls stop and ask the guardian.

One filter for all pods: ioctls whose number is one of RM's object calls. It looks at the number alone, as
RM does (nv.c:nvidia_ioctl ignores type and direction), so an odd type byte is no way past it. Everything
else, kernel launches included, never leaves the fast path.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
from dataclasses import dataclass
from typing import Any

from cffi import FFI

from qgpu.errors import NotSupportedError
from qgpu.rm import abi

#: Escapes that create, free, share or control objects, and the one that wraps others.
WATCHED = (
    abi.NV_ESC_RM_ALLOC_MEMORY,
    abi.NV_ESC_RM_FREE,
    abi.NV_ESC_RM_CONTROL,
    abi.NV_ESC_RM_ALLOC,
    abi.NV_ESC_RM_DUP_OBJECT,
    abi.NV_ESC_RM_VID_HEAP_CONTROL,
    abi.NV_ESC_IOCTL_XFER_CMD,
)

# (AUDIT_ARCH, numbers of ioctl): native, and the 32-bit ways into the same kernel (linux/audit.h).
_IOCTLS = {
    "x86_64": ((0xC000003E, (16, 0x40000000 + 514)), (0x40000003, (54,))),
    "aarch64": ((0xC00000B7, (29,)), (0x40000028, (54,))),
}

# linux/filter.h and linux/seccomp.h
_LD_ABS, _JEQ, _AND, _RET = 0x20, 0x15, 0x54, 0x06
_RET_ALLOW, _RET_USER_NOTIF = 0x7FFF0000, 0x7FC00000
_OFFSET_NR, _OFFSET_ARCH, _OFFSET_REQUEST = 0, 4, 24
_SET_MODE_FILTER = 1
_SPEC_ALLOW, _NEW_LISTENER, _WAIT_KILLABLE_RECV = 1 << 2, 1 << 3, 1 << 5
_PR_SET_NO_NEW_PRIVS = 38
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}

_ffi: Any = FFI()
_ffi.cdef(
    """
    struct sock_fprog { unsigned short len; void *filter; };
    long syscall(long number, ...);
    int prctl(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d);
    """
)
_libc: Any = _ffi.dlopen(None)


def program(machine: str) -> bytes:
    """Assemble the filter for a machine as a classic BPF program. Raises NotSupportedError."""
    try:
        arches = _IOCTLS[machine]
    except KeyError:
        raise NotSupportedError(f"machine {machine}: qgpu has no seccomp filter for it") from None
    code: list[_Instruction | str] = [_load(_OFFSET_ARCH)]
    code += [_jump_if(arch, f"arch {arch}") for arch, _ in arches]
    code += [_return(_RET_ALLOW)]
    for arch, numbers in arches:
        code += [f"arch {arch}", _load(_OFFSET_NR)]
        code += [_jump_if(number, "ioctl") for number in numbers]
        code += [_return(_RET_ALLOW)]
    code += ["ioctl", _load(_OFFSET_REQUEST), _Instruction(_AND, 0xFF)]
    code += [_jump_if(number, "notify") for number in WATCHED]
    code += [_return(_RET_ALLOW), "notify", _return(_RET_USER_NOTIF)]
    return _assemble(code)


@dataclass(frozen=True, slots=True)
class _Instruction:
    code: int
    k: int
    #: Label to go to when a comparison holds; it falls through when not.
    target: str = ""


def _load(offset: int) -> _Instruction:
    return _Instruction(_LD_ABS, offset)


def _jump_if(value: int, target: str) -> _Instruction:
    return _Instruction(_JEQ, value, target)


def _return(value: int) -> _Instruction:
    return _Instruction(_RET, value)


def _assemble(code: list[_Instruction | str]) -> bytes:
    """Resolve labels (plain strings) and pack struct sock_filter."""
    labels: dict[str, int] = {}
    instructions: list[_Instruction] = []
    for item in code:
        if isinstance(item, str):
            labels[item] = len(instructions)
        else:
            instructions.append(item)
    return b"".join(
        struct.pack("<HBBI", i.code, labels[i.target] - at - 1 if i.target else 0, 0, i.k)
        for at, i in enumerate(instructions)
    )


def install() -> int:
    """Put the filter on the calling process and all it becomes; return the listener's descriptor.

    Raises NotSupportedError where the kernel has no user notification, and when a filter with a listener is
    there already (a pod inside a pod).
    """
    machine = platform.machine()
    code = program(machine)
    buffer = _ffi.from_buffer(code)
    prog = _ffi.new("struct sock_fprog *", {"len": len(code) // 8, "filter": buffer})
    best, older = _NEW_LISTENER | _SPEC_ALLOW | _WAIT_KILLABLE_RECV, _NEW_LISTENER | _SPEC_ALLOW
    for flags in (best, older, best, older):
        fd = _libc.syscall(
            _SYS_SECCOMP[machine],
            _ffi.cast("long", _SET_MODE_FILTER),
            _ffi.cast("long", flags),
            _ffi.cast("void *", prog),
        )
        if fd >= 0:
            return int(fd)
        if _ffi.errno == errno.EACCES:  # without CAP_SYS_ADMIN a filter needs this; set-uid programs lose theirs
            _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    raise NotSupportedError(
        f"seccomp user notification: {os.strerror(_ffi.errno)}; "
        "it needs Linux 5.5 or newer, and a pod cannot be started inside a pod"
    )
