"""Descriptors are few, and whoever runs out of them must not stop others: what is taken for long leaves some over.

A guardian holds a descriptor for each process and each listener; one that had none left could not serve a call, nor
hear its daemon. So those that are held for long may not be the last ones, and a call that finds none waits for one:
a pod is not told of our want, unless it lasts.
"""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable
from typing import TypeVar

import structlog

#: What the kernel says when there is none left, here or on the whole machine.
NONE_LEFT = frozenset({errno.EMFILE, errno.ENFILE})
#: So many are for what is open only for a moment.
_LEFT_OVER = 256
#: Up to so many are counted.
_FEW = 4096
#: How long a call waits for one, and how often it looks. Longer than any moment is; past it the host is broken.
_PATIENCE_S, _TRY_AGAIN_S = 60.0, 0.02

_T = TypeVar("_T")

_log = structlog.get_logger("guardian")


def long_held(fd: int) -> int:
    """Return a descriptor that is to be held for long. Raises OSError, and closes it, when too few are left.

    That is EAGAIN, for which nobody waits: it may be so for long. The kernel gives out the lowest number that is free,
    so a high one says that the table is full. Where there are few, all are counted.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    scarce = most <= _FEW and fd >= most // 4 and left(_open()) == 0
    if most != resource.RLIM_INFINITY and (scarce or fd >= most - min(_LEFT_OVER, most // 4)):
        os.close(fd)
        raise OSError(errno.EAGAIN, "too few descriptors are left")
    return fd


def _open() -> int:
    """Return how many descriptors are open."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # not even one for that
        return 1 << 62


def left(used: int) -> int:
    """Return how many descriptors are left for what is held for long, where so many are used."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(0, most - min(_LEFT_OVER, most // 4) - used) if most != resource.RLIM_INFINITY else 1 << 20


def is_fair(own: int, left: int) -> bool:
    """Tell whether a pod that has so many of something may have one more: half as many as would then be left.

    However many pods take as many as they can, one that has none still gets some.
    """
    return 2 * own < left


def patiently(do: Callable[[], _T], may_wait: Callable[[], bool] = lambda: True) -> _T:
    """Do what takes descriptors for a moment; while none is left, try again as long as that is of use, for a minute.

    Not to be called under the lock, nor by the main loop. Raises OSError.
    """
    deadline = None
    while True:
        try:
            return do()
        except OSError as error:
            if error.errno not in NONE_LEFT or not may_wait():
                raise
            if deadline is None:
                _log.warning("no descriptor is left: a call waits", reason=str(error))
                deadline = time.monotonic() + _PATIENCE_S
            elif time.monotonic() >= deadline:
                raise
        time.sleep(_TRY_AGAIN_S)
