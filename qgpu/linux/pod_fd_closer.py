"""Closes files that came from pods, in one thread per pod: a pod can make a close as slow as it likes.

A lingering socket or a file on FUSE waits for the pod. Closing the last descriptor of a control file frees its client.
``untrusted_fds`` closes in a pool that all senders share; here one pod must not use up the threads of the others.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

#: How many files of a pod may wait to be closed; until there are fewer, no more are taken from it.
MOST_WAITING = 64
#: After this long without a close, the pod counts as stuck.
_STUCK_S = 1.0
#: A pod's thread ends after this long without work.
_IDLE_S = 1.0


@dataclass(slots=True)
class _Queue:
    """One pod's waiting files, including the one that is being closed."""

    waiting: deque[int] = field(default_factory=deque)
    more: threading.Condition = field(default_factory=threading.Condition)
    served: bool = False
    #: When the last file was closed, or the first was added.
    moved_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class PodFdCloser:
    """All pods' files to close; ``close`` returns at once."""

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
            with suppress(RuntimeError):  # no thread is available; the next file starts one
                threading.Thread(target=_work, args=(queue,), name="qgpu-close", daemon=True).start()
                queue.served = True

    def is_full(self, pod: str) -> bool:
        """Tell whether so many files of a pod wait that no more may be taken from it."""
        queue = self._queues.get(pod)
        return queue is not None and len(queue.waiting) >= MOST_WAITING

    def is_stuck(self, pod: str) -> bool:
        """Tell whether a pod keeps its files from being closed, for example with a lingering socket."""
        queue = self._queues.get(pod)
        return queue is not None and bool(queue.waiting) and time.monotonic() - queue.moved_s > _STUCK_S

    def forget(self, pod: str) -> None:
        """Forget a retired pod; its waiting files are still closed."""
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
