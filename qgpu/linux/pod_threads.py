"""Work on pods' files, in one thread per pod: a pod can make it as slow as it likes, and delays only its own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

#: A pod's thread ends after this long without work.
_IDLE_S = 1.0

_log = structlog.get_logger("guardian")


@dataclass(slots=True)
class _Queue:
    """One pod's waiting work, including what is being done."""

    waiting: deque[Callable[[], object]] = field(default_factory=deque)
    more: threading.Condition = field(default_factory=threading.Condition)
    served: bool = False
    #: When the last work was done, or the first was added.
    moved_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class PodThreads:
    """The threads of all pods, and what they still have to do in order."""

    name: str
    _queues: dict[str, _Queue] = field(default_factory=dict)

    def do(self, pod: str, work: Callable[[], object]) -> None:
        """Do work soon. Without a free thread it waits for the next work of the pod, or for ``retry``."""
        queue = self._queues.setdefault(pod, _Queue())
        with queue.more:
            if not queue.waiting:
                queue.moved_s = time.monotonic()
            queue.waiting.append(work)
            self._serve(queue)

    def _serve(self, queue: _Queue) -> None:
        if queue.served:
            queue.more.notify()
            return
        with suppress(RuntimeError):  # no thread is available
            threading.Thread(target=_work, args=(queue,), name=self.name, daemon=True).start()
            queue.served = True

    def retry(self) -> None:
        """Start the threads that were not available."""
        for queue in list(self._queues.values()):
            with queue.more:
                if queue.waiting:
                    self._serve(queue)

    def waiting(self, pod: str) -> int:
        """Return how much work of a pod is not done."""
        queue = self._queues.get(pod)
        return len(queue.waiting) if queue is not None else 0

    def stalled_s(self, pod: str) -> float:
        """Return for how long none of a pod's work was done, in s; 0 if there is none."""
        queue = self._queues.get(pod)
        return time.monotonic() - queue.moved_s if queue is not None and queue.waiting else 0.0

    def forget(self, pod: str) -> None:
        """Forget a retired pod; its waiting work is still done."""
        self._queues.pop(pod, None)


def _work(queue: _Queue) -> None:
    """Do work until none has come for a while."""
    while True:
        with queue.more:
            if not queue.waiting and not queue.more.wait_for(lambda: bool(queue.waiting), _IDLE_S):
                queue.served = False
                return
        try:
            queue.waiting[0]()
        except Exception:  # noqa: BLE001 - the next work does not depend on it
            _log.exception("work on a pod's files failed")
        queue.waiting.popleft()
        queue.moved_s = time.monotonic()
