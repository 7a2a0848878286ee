"""Closes files that came from a pod, in a thread for each pod: closing may take as long as the pod likes.

A socket that lingers and a file on FUSE wait for the pod. The last descriptor of a control file frees its client.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

#: So many files of a pod may wait to be closed; until fewer do, none is taken from it.
MOST_WAITING = 64
#: A pod whose files are not closed for this long keeps them from it.
_STUCK_S = 1.0
#: A pod's thread ends when there has been nothing to close for this long.
_IDLE_S = 1.0


@dataclass(slots=True)
class _Queue:
    """One pod's files that wait, that which is being closed among them."""

    waiting: deque[int] = field(default_factory=deque)
    more: threading.Condition = field(default_factory=threading.Condition)
    served: bool = False
    #: When the last file was closed, or the first came.
    moved_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class FdCloser:
    """All pods' files that are to be closed; ``close`` returns at once."""

    _queues: dict[str, _Queue] = field(default_factory=dict)

    def close(self, pod: str, fd: int) -> None:
        """Close a descriptor of ours soon."""
        queue = self._queues.setdefault(pod, _Queue())
        with queue.more:
            if not queue.waiting:
                queue.moved_s = time.monotonic()
            queue.waiting.append(fd)
            if queue.served:
                queue.more.notify()
                return
            with suppress(RuntimeError):  # no thread is to be had now; the next file brings one
                threading.Thread(target=_work, args=(queue,), name="qgpu-close", daemon=True).start()
                queue.served = True

    def is_full(self, pod: str) -> bool:
        """Tell whether so many files of a pod wait that no more are to be taken from it."""
        queue = self._queues.get(pod)
        return queue is not None and len(queue.waiting) >= MOST_WAITING

    def is_stuck(self, pod: str) -> bool:
        """Tell whether a pod keeps its files from being closed, as a socket that lingers does."""
        queue = self._queues.get(pod)
        return queue is not None and bool(queue.waiting) and time.monotonic() - queue.moved_s > _STUCK_S

    def forget(self, pod: str) -> None:
        """Forget a pod that is no more; what waits is closed all the same."""
        self._queues.pop(pod, None)


def _work(queue: _Queue) -> None:
    """Close files until none has come for a while."""
    while True:
        with queue.more:
            if not queue.waiting and not queue.more.wait_for(lambda: bool(queue.waiting), _IDLE_S):
                queue.served = False
                return
        with suppress(OSError):
            os.close(queue.waiting[0])
        queue.waiting.popleft()
        queue.moved_s = time.monotonic()
