"""Remembers the pods of processes and contexts that have ended: the card may still report GPU time of theirs.

A process that made an RM client stays known as long as that client exists, because another process may go on to use
it, and RM goes on to name its maker.
"""

from __future__ import annotations

import time
from collections import OrderedDict

#: How many are remembered for each pod. Between two samples, a quarter of a second apart, no pod ends so many that ran.
MOST_ENDED = 4096
#: For how long, in seconds. A process outside of all pods may have the number later.
KEPT_S = 10.0


class LatelyEnded:
    """The latest of each pod's numbers that ended: of processes, or of contexts."""

    def __init__(self) -> None:
        #: By pod, when each of its numbers ended, in seconds of the monotonic clock, the oldest first. A number is in
        #: one pod only.
        self._ended: dict[str, OrderedDict[int, float]] = {}

    def add(self, number: int, pod: str) -> None:
        """Remember a number; the pod's oldest is forgotten if there are too many."""
        for other in self._ended.values():
            other.pop(number, None)
        ended = self._ended.setdefault(pod, OrderedDict())
        ended[number] = time.monotonic()
        if len(ended) > MOST_ENDED:
            ended.popitem(last=False)

    def retire(self, pod: str) -> None:
        """Forget a pod with its numbers."""
        self._ended.pop(pod, None)

    def pod_of(self, number: int) -> str | None:
        """Return the pod of a number that ended lately; None if it is unknown."""
        pods = (pod for pod, ended in self._ended.items() if number in ended)
        return next((pod for pod in pods if time.monotonic() - self._ended[pod][number] <= KEPT_S), None)


class EndedProcesses(LatelyEnded):
    """The latest of each pod's processes that ended, and all that made a client which still exists."""

    def __init__(self) -> None:
        super().__init__()
        #: By process, the clients that it made, each with its pod, the latest last.
        self._made: dict[int, dict[int, str]] = {}

    def client_made(self, client: int, pid: int, pod: str) -> None:
        """Remember who made a client, or that it is another pod's now: RM still names its maker."""
        self._made.setdefault(pid, {})[client] = pod

    def client_gone(self, client: int, pid: int) -> None:
        """Forget that a process made a client."""
        del self._made[pid][client]
        if not self._made[pid]:
            del self._made[pid]

    def has_made(self, number: int) -> bool:
        """Tell whether a process of this number made a client that exists."""
        return number in self._made

    def made_for_others(self, number: int, pod: str) -> bool:
        """Tell whether a process of this number made a client that exists and is another pod's."""
        return any(of != pod for of in self._made.get(number, {}).values())

    def pod_of(self, number: int) -> str | None:
        """Return the pod of a process that ended: of the latest client that it made, else its own."""
        if (made := self._made.get(number)) is not None:
            return made[next(reversed(made))]
        return super().pod_of(number)
