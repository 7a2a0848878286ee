"""Remembers the pods of processes that have ended: the card may still report GPU time of theirs."""

from __future__ import annotations

from collections import deque

#: How many are remembered for each pod. Between two samples, a quarter of a second apart, no pod ends so many that ran.
MOST_ENDED = 4096


class EndedProcesses:
    """The latest of each pod's processes that ended."""

    def __init__(self) -> None:
        self._pods: dict[int, str] = {}
        self._pids: dict[str, deque[int]] = {}

    def add(self, pid: int, pod: str) -> None:
        """Remember a process; the pod's oldest is forgotten if there are too many."""
        if self._pods.get(pid) == pod:
            return
        self._pods[pid] = pod
        pids = self._pids.setdefault(pod, deque())
        pids.append(pid)
        if len(pids) > MOST_ENDED:
            self._forget(pids.popleft(), pod)

    def retire(self, pod: str) -> None:
        """Forget a pod with its processes."""
        for pid in self._pids.pop(pod, ()):
            self._forget(pid, pod)

    def pod_of(self, pid: int) -> str | None:
        """Return the pod of a process that has ended; None if it is unknown."""
        return self._pods.get(pid)

    def _forget(self, pid: int, pod: str) -> None:
        if self._pods.get(pid) == pod:  # a process of another pod may have had its number since
            del self._pods[pid]
