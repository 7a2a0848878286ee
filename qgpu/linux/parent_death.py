"""Children that do not outlive their parent, however it ends (PR_SET_PDEATHSIG, prctl(2))."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from functools import partial

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h


def terminated_with_parent() -> Callable[[], None]:
    """Return a ``preexec_fn`` for ``subprocess``: the kernel sends the child SIGTERM when this process ends.

    The program that it executes keeps this, unless it gains rights by being executed. For processes with one thread.
    """
    return partial(end_with_parent, os.getpid(), signal.SIGTERM, ctypes.CDLL(None))


def end_with_parent(parent: int, with_signal: signal.Signals, libc: ctypes.CDLL | None = None) -> None:
    """Let the kernel send this process a signal when its parent, process ``parent``, ends; end if it has ended."""
    (libc or ctypes.CDLL(None)).prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(128 + with_signal)
