"""A timer that can be polled, exact to tens of µs; poll's own timeouts round up to milliseconds."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_CLOCK_MONOTONIC = 1
_TFD_CLOEXEC_NONBLOCK = 0o2000000 | 0o4000

_libc = ctypes.CDLL(None, use_errno=True)


class _Itimerspec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Timer:
    """A timerfd on CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self.fd = _libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_CLOEXEC_NONBLOCK)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def set(self, after_ns: int) -> None:
        """Become readable ``after_ns`` from now."""
        value = max(1, after_ns)
        spec = _Itimerspec(0, 0, value // 1_000_000_000, value % 1_000_000_000)
        _libc.timerfd_settime(self.fd, 0, ctypes.byref(spec), None)

    def clear(self) -> None:
        """Consume the expiry."""
        with suppress(BlockingIOError):
            os.read(self.fd, 8)
