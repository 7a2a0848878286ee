"""Drops capabilities of the calling thread only.

RM checks the caller for CAP_SYS_ADMIN and CAP_SYS_NICE. A thread of ours makes a pod's calls, and must not get more
than the pod itself would.
"""

from __future__ import annotations

import ctypes
import os
import platform

#: What access to a pod's processes needs; RM checks neither.
CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE = 2, 19

_SYS_CAPGET = {"x86_64": 125, "aarch64": 90}
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def keep_only(*capabilities: int) -> None:
    """Drop all capabilities of this thread except these. Raises OSError."""
    header, sets = _Header(_VERSION_3, 0), (_Sets * 2)()
    machine = platform.machine()
    _call(_SYS_CAPGET[machine], header, sets)
    wanted = sum(1 << capability for capability in capabilities)
    for i, part in enumerate(sets):
        kept = wanted >> (32 * i) & 0xFFFFFFFF & part.permitted
        part.effective = part.permitted = kept
        part.inheritable = 0
    _call(_SYS_CAPSET[machine], header, sets)


def _call(number: int, header: _Header, sets: ctypes.Array[_Sets]) -> None:
    if _libc.syscall(number, ctypes.byref(header), sets) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
