"""The seccomp filter of a pod: which system calls stop and ask the guardian.

All pods have the same filter. It stops RM's object calls (ioctls by number and size), UVM's calls (by number), and
mappings that could become managed memory. RM looks at number and size alone (nv.c:nvidia_ioctl ignores type and
direction, and every call has one or two sizes), so an odd type byte does not pass the filter, and RM refuses any other
size itself. All other calls stay in the kernel, kernel launches included.

The 32-bit entries into the kernel stop at the same calls. x32 returns ENOSYS: no distribution enables it, and a second
numbering of the calls would bypass the filter. The 32-bit mmap with one pointer also returns ENOSYS, because the filter
cannot read its arguments; no C library of this century uses it.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
from functools import partial
from typing import Any, NamedTuple

from cffi import FFI

from qgpu.errors import NotSupportedError
from qgpu.guardian.rules.escapes import WATCHED, WATCHED_NUMBERS
from qgpu.linux.seccomp_notify import Notification
from qgpu.nvidia import uvm

#: The bits of a request that RM looks at.
NUMBER_AND_SIZE = 0x3FFF00FF

#: UVM's calls that are watched by all their bits: of one the low byte is that of FIONREAD, which programs call often.
_EXACT = frozenset({uvm.INITIALIZE, uvm.REGISTER_GPU_VASPACE, uvm.REGISTER_CHANNEL, *uvm.TRACKERS})
#: Parts of requests, as (mask, value), that together cover all watched ones, for filters that a runtime assembles.
WATCHED_PREFIXES = (
    *sorted((0xFF, number) for number in {each for each, _ in WATCHED} | WATCHED_NUMBERS | uvm.WATCHED - _EXACT),
    *((0xFFFFFFFF, number) for number in sorted(_EXACT)),
)


class _Arch(NamedTuple):
    """One system-call entry of the kernel: its AUDIT_ARCH and its call numbers (linux/audit.h)."""

    audit: int
    ioctl: int
    mmap: int
    #: mmap with all arguments behind one pointer, which the filter cannot read.
    old_mmap: int | None = None
    #: The bit that marks a second numbering of the same calls.
    other_numbering: int | None = None


#: The native entry first, then the 32-bit one.
ARCHES = {
    "x86_64": (_Arch(0xC000003E, 16, 9, other_numbering=0x40000000), _Arch(0x40000003, 54, 192, old_mmap=90)),
    "aarch64": (_Arch(0xC00000B7, 29, 222), _Arch(0x40000028, 54, 192)),
}

# linux/filter.h and linux/seccomp.h
_LD_ABS, _JEQ, _JSET, _AND, _RET = 0x20, 0x15, 0x45, 0x54, 0x06
_RET_ALLOW, _RET_USER_NOTIF, _RET_ENOSYS = 0x7FFF0000, 0x7FC00000, 0x00050000 | errno.ENOSYS
_OFFSET_NR, _OFFSET_ARCH = 0, 4


class _Instruction(NamedTuple):
    code: int
    k: int
    #: Label to jump to if the comparison holds; otherwise the next instruction runs.
    target: str = ""


_load, _jump_if, _return = partial(_Instruction, _LD_ABS), partial(_Instruction, _JEQ), partial(_Instruction, _RET)


def _argument(number: int, *, upper: bool = False) -> int:
    return 16 + 8 * number + 4 * upper


# linux/mman.h
PROT_READ_WRITE, MAP_SHARED, MAP_FIXED, MAP_ANONYMOUS, MAP_FIXED_NOREPLACE = 0x3, 0x01, 0x10, 0x20, 0x100000
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


_MAPPINGS = {(arch.audit, arch.mmap): arch for arches in ARCHES.values() for arch in arches}


def is_mapping(call: Notification) -> bool:
    """Tell whether a stopped call is a mapping rather than an ioctl."""
    return (call.arch, call.number) in _MAPPINGS


def mapping(call: Notification) -> tuple[int, int]:
    """Return the descriptor and the size, in bytes, of a mapping."""
    page = os.sysconf("SC_PAGE_SIZE")
    size = -(-call.arguments[1] // page) * page
    return call.arguments[4] & 0xFFFFFFFF, size


def program(machine: str) -> bytes:
    """Assemble the filter for a machine as a classic BPF program. Raises NotSupportedError."""
    try:
        arches = ARCHES[machine]
    except KeyError:
        raise NotSupportedError(f"machine {machine}: qgpu has no seccomp filter for it") from None
    code: list[_Instruction | str] = [_load(_OFFSET_ARCH)]
    code += [_jump_if(arch.audit, f"arch {arch.audit}") for arch in arches]
    code += [_return(_RET_ENOSYS)]
    for arch in arches:
        code += [f"arch {arch.audit}", _load(_OFFSET_NR)]
        if arch.other_numbering is not None:
            code += [_Instruction(_JSET, arch.other_numbering, "no such call")]
        if arch.old_mmap is not None:
            code += [_jump_if(arch.old_mmap, "no such call")]
        code += [_jump_if(arch.ioctl, "ioctl"), _jump_if(arch.mmap, "mmap"), _return(_RET_ALLOW)]
    code += ["ioctl", _load(_argument(1))]
    code += [_jump_if(number, "notify") for number in sorted(uvm.WATCHED)]
    code += [_Instruction(_AND, NUMBER_AND_SIZE)]
    code += [_jump_if(size << 16 | number, "notify") for number, size in sorted(WATCHED)]
    code += [_Instruction(_AND, 0xFF), *(_jump_if(number, "notify") for number in sorted(WATCHED_NUMBERS))]
    code += [_return(_RET_ALLOW), *_could_be_managed()]
    return _assemble([*code, "notify", _return(_RET_USER_NOTIF), "no such call", _return(_RET_ENOSYS)])


def _could_be_managed() -> list[_Instruction | str]:
    """Match mappings that UVM can turn into managed memory.

    UVM requires a mapping that is shared, readable and writable, at an offset equal to its address. That offset is not
    0, unless the call asks for address 0 itself.
    """
    return [
        *("mmap", _load(_argument(2)), _Instruction(_AND, PROT_READ_WRITE)),
        *(_jump_if(PROT_READ_WRITE, "writable"), _return(_RET_ALLOW)),
        *("writable", _load(_argument(3)), _Instruction(_AND, MAP_SHARED | MAP_ANONYMOUS)),
        *(_jump_if(MAP_SHARED, "shared"), _return(_RET_ALLOW)),
        *("shared", _load(_argument(5)), _Instruction(_JSET, 0xFFFFFFFF, "notify")),
        *(_load(_argument(5, upper=True)), _Instruction(_JSET, 0xFFFFFFFF, "notify")),
        *(_load(_argument(3)), _Instruction(_JSET, MAP_FIXED | MAP_FIXED_NOREPLACE, "fixed"), _return(_RET_ALLOW)),
        *("fixed", _load(_argument(0)), _Instruction(_JSET, 0xFFFFFFFF, "allow")),
        *(_load(_argument(0, upper=True)), _Instruction(_JSET, 0xFFFFFFFF, "allow")),
        *(_return(_RET_USER_NOTIF), "allow", _return(_RET_ALLOW)),
    ]


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
    """Install the filter on the calling process and its descendants; return the listener's descriptor.

    Raises NotSupportedError if the kernel has no user notification, or if a filter with a listener exists already (a
    pod inside a pod).
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
        if _ffi.errno == errno.EACCES:  # without CAP_SYS_ADMIN a filter needs this; set-uid programs then lose theirs
            _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    raise NotSupportedError(
        f"seccomp user notification: {os.strerror(_ffi.errno)}; "
        "it needs Linux 5.10 or newer, and a pod cannot be started inside a pod"
    )
