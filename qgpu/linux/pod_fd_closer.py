"""Closes files that came from pods, in one thread per pod: a pod can make a close as slow as it likes.

A lingering socket or a file on FUSE waits for the pod. Closing the last descriptor of a control file frees its client.
``untrusted_fds`` closes in a pool that all senders share; here one pod must not use up the threads of the others.
"""

from __future__ import annotations

import os
from contextlib import suppress

from qgpu.linux.pod_threads import PodThreads

#: How many files of a pod may wait to be closed; until there are fewer, no more are taken from it.
MOST_WAITING = 64
#: After this long without a close, the pod counts as stuck.
_STUCK_S = 1.0


class PodFdCloser:
    """All pods' files to close; ``close`` returns at once."""

    def __init__(self) -> None:
        self._threads = PodThreads("qgpu-close")
        self.forget = self._threads.forget

    def close(self, pod: str, fd: int) -> None:
        """Close a descriptor of ours soon."""

        def close() -> None:
            with suppress(OSError):
                os.close(fd)

        self._threads.do(pod, close)

    def is_full(self, pod: str) -> bool:
        """Tell whether so many files of a pod wait that no more may be taken from it."""
        return self._threads.waiting(pod) >= MOST_WAITING

    def is_stuck(self, pod: str) -> bool:
        """Tell whether a pod keeps its files from being closed, for example with a lingering socket."""
        return self._threads.stalled_s(pod) > _STUCK_S
