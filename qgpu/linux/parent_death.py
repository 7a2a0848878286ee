"""Children that do not outlive their parent, however it ends (PR_SET_PDEATHSIG, prctl(2))."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h


def terminated_with_parent() -> Callable[[], None]:
    """Return a ``preexec_fn`` for ``subprocess``: the kernel sends the child SIGTERM when this process ends.

    The program that it executes keeps this, unless it gains rights by being executed. For processes with one thread.
    """
    libc, parent = ctypes.CDLL(None), os.getpid()

    def arm() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it ended before the call
            os._exit(128 + signal.SIGTERM)

    return arm
