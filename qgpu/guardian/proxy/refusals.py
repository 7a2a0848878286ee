"""Counts of what pods were refused, by pod and kind of call."""

from __future__ import annotations

import threading
from collections import Counter

import structlog

from qgpu.guardian.rules import tools

_log = structlog.get_logger("guardian")

#: How many kinds are counted for a pod; pods choose the numbers of their calls.
_MOST_KINDS = 64


class Refusals:
    """How often each pod was refused what, under the lock that its readers hold."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self.counts: Counter[tuple[str, str]] = Counter()
        self._kinds: Counter[str] = Counter()

    def count(self, pod: str, what: str) -> None:
        """Count a refusal by its kind; beyond a limit of kinds per pod, count it as "other calls"."""
        with self._lock:
            first = (pod, what) not in self.counts
            if first:
                if self._kinds[pod] >= _MOST_KINDS:
                    what = "other calls"
                self._kinds[pod] += 1
            self.counts[pod, what] += 1
        if first and (found := tools.refused(what)) is not None:
            tool, reason = found
            _log.warning("a tool was refused", pod=pod, tool=tool.name, call=what, reason=reason, remedy=tool.remedy)

    def forget(self, pod: str) -> None:
        """Drop the counts of a pod."""
        self._kinds.pop(pod, None)
        for key in [key for key in self.counts if key[0] == pod]:
            del self.counts[key]
