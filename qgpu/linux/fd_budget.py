"""Keeps some file descriptors free, so that the guardian can always serve a call and hear its daemon.

A guardian holds a descriptor for each process and each listener. The last free descriptors are reserved for files that
are open for a moment, and a call that finds none waits for one. A pod sees no error from this unless the shortage
lasts.
"""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable
from typing import TypeVar

import structlog

#: The errors for no free descriptor: in this process, or on the whole machine.
OUT_OF_FDS = frozenset({errno.EMFILE, errno.ENFILE})
#: Descriptors reserved for files that are open for a moment.
_LEFT_OVER = 256
#: With a limit up to this, open descriptors are counted.
_FEW = 4096
#: How long a call waits for a descriptor, and how often it retries. Normal use is much shorter; after that the host is
#: broken.
_PATIENCE_S, _TRY_AGAIN_S = 60.0, 0.02
#: For how many pods the guaranteed number of anything is reserved; and that number for whatever takes a descriptor.
FOR_NEW_PODS, _GUARANTEED = 64, 8

_T = TypeVar("_T")

_log = structlog.get_logger("guardian")


def check_headroom(fd: int) -> int:
    """Return a descriptor that will be held for long. Raises OSError, after closing it, if too few are left.

    The error is EAGAIN, which is not retried, because the shortage may last. The kernel gives out the lowest free
    number, so a high number means a full table. With a low limit, all open descriptors are counted.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    scarce = most <= _FEW and fd >= most // 4 and headroom(_open()) == 0
    if most != resource.RLIM_INFINITY and (scarce or fd >= most - min(_LEFT_OVER, most // 4)):
        os.close(fd)
        raise OSError(errno.EAGAIN, "too few descriptors are left")
    return fd


def _open() -> int:
    """Return the number of open descriptors."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # no descriptor is free to count them
        return 1 << 62


def headroom(used: int) -> int:
    """Return how many descriptors may still be held for long when ``used`` are."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(0, most - min(_LEFT_OVER, most // 4) - used) if most != resource.RLIM_INFINITY else 1 << 20


def within_fair_share(own: int, remaining: int, guaranteed: int = _GUARANTEED) -> bool:
    """Tell whether a pod may have one more of something: it has less than half of what remains besides the reserve.

    A pod below the guaranteed number may use the reserve. So each of many pods gets that number, whatever others take.
    """
    return remaining > 0 if own < guaranteed else 2 * own < remaining - FOR_NEW_PODS * guaranteed


def retry_on_emfile(do: Callable[[], _T], may_wait: Callable[[], bool] = lambda: True) -> _T:
    """Retry an operation that needs descriptors while none is free, for up to a minute.

    Do not call it under the lock or from the main loop. Raises OSError.
    """
    deadline = None
    while True:
        try:
            return do()
        except OSError as error:
            if error.errno not in OUT_OF_FDS or not may_wait():
                raise
            if deadline is None:
                _log.warning("no free descriptor: a call waits", reason=str(error))
                deadline = time.monotonic() + _PATIENCE_S
            elif time.monotonic() >= deadline:
                raise
        time.sleep(_TRY_AGAIN_S)
