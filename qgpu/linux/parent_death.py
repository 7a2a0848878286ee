"""Children that do not outlive their parent, however it ends (PR_SET_PDEATHSIG, prctl(2)).

``python -m qgpu.linux.parent_death PARENT COMMAND...`` executes a command that ends with process PARENT.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from qgpu.linux.interpreter import python

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h


def terminated_with_parent() -> list[str]:
    """Return what to put before a child's command: the kernel sends the child SIGTERM when this thread ends.

    The program keeps this, unless it gains rights by being executed.
    """
    return python("-m", __name__, str(os.getpid()))


def end_with_parent(parent: int, with_signal: signal.Signals) -> None:
    """Let the kernel send this process a signal when its parent, process ``parent``, ends; end if it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(128 + with_signal)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606
