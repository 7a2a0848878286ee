"""Remembers the pods of processes that have ended: the card may still report GPU time of theirs."""

from __future__ import annotations

import time
from collections import OrderedDict

#: How many are remembered for each pod. Between two samples, a quarter of a second apart, no pod ends so many that ran.
MOST_ENDED = 4096
#: For how long, in seconds. A process outside of all pods may have the number later.
KEPT_S = 10.0


class EndedProcesses:
    """The latest of each pod's processes that ended."""

    def __init__(self) -> None:
        self._pods: dict[int, str] = {}
        #: By pod, when each of its processes ended, in seconds of the monotonic clock, the oldest first.
        self._ended: dict[str, OrderedDict[int, float]] = {}

    def add(self, pid: int, pod: str) -> None:
        """Remember a process; the pod's oldest is forgotten if there are too many."""
        ended = self._ended.setdefault(pod, OrderedDict())
        ended[pid] = time.monotonic()
        ended.move_to_end(pid)
        self._pods[pid] = pod
        if len(ended) > MOST_ENDED:
            self._forget(ended.popitem(last=False)[0], pod)

    def retire(self, pod: str) -> None:
        """Forget a pod with its processes."""
        for pid in self._ended.pop(pod, ()):
            self._forget(pid, pod)

    def pod_of(self, pid: int) -> str | None:
        """Return the pod of a process that ended lately; None if it is unknown."""
        pod = self._pods.get(pid)
        if pod is None or time.monotonic() - self._ended[pod][pid] > KEPT_S:
            return None
        return pod

    def _forget(self, pid: int, pod: str) -> None:
        if self._pods.get(pid) == pod:  # a process of another pod may have had its number since
            del self._pods[pid]
