"""Drops capabilities of the calling thread only.

RM checks the caller for CAP_SYS_ADMIN and CAP_SYS_NICE. A thread of ours makes a pod's calls, and must not get more
than the pod itself would.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

#: What access to a pod's processes needs; RM checks neither.
CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE = 2, 19
#: What RM asks of a profiler's process (osCheckAccess), unless the host lets every user profile.
CAP_PERFMON = 38

_SYS_CAPGET = {"x86_64": 125, "aarch64": 90}
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def keep_only(*capabilities: int, at_hand: int | None = None) -> None:
    """Drop all capabilities of this thread but these; ``at_hand`` takes effect in ``with_one`` only. Raises OSError."""
    header, sets = _get()
    wanted = sum(1 << capability for capability in capabilities)
    permitted = wanted if at_hand is None else wanted | 1 << at_hand
    for i, part in enumerate(sets):
        part.effective = wanted >> (32 * i) & 0xFFFFFFFF & part.permitted
        part.permitted &= permitted >> (32 * i) & 0xFFFFFFFF
        part.inheritable = 0
    _call(_SYS_CAPSET[platform.machine()], header, sets)


@contextmanager
def with_one(capability: int) -> Iterator[None]:
    """Let a capability that is at hand take effect in the block; without it nothing changes. Raises OSError."""
    header, sets = _get()
    part, bit = sets[capability // 32], 1 << capability % 32
    if not part.permitted & bit or part.effective & bit:
        yield
        return
    part.effective |= bit
    _call(_SYS_CAPSET[platform.machine()], header, sets)
    try:
        yield
    finally:
        part.effective &= ~bit
        _call(_SYS_CAPSET[platform.machine()], header, sets)


def _get() -> tuple[_Header, ctypes.Array[_Sets]]:
    header, sets = _Header(_VERSION_3, 0), (_Sets * 2)()
    _call(_SYS_CAPGET[platform.machine()], header, sets)
    return header, sets


def _call(number: int, header: _Header, sets: ctypes.Array[_Sets]) -> None:
    if _libc.syscall(number, ctypes.byref(header), sets) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
