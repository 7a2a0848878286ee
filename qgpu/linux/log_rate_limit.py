"""Limits how many log lines of one kind are written per second, so that a pod cannot flood the log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

#: Lines of one kind per second.
MOST = 20


class LogRateLimit:
    """A structlog processor. The next line after dropped ones says how many were dropped."""

    def __init__(self, most: int = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        #: By kind: start of the current second, and the lines in it.
        self._counts: dict[str, tuple[float, int]] = {}

    def __call__(self, logger: Any, name: str, event_dict: MutableMapping[str, Any]) -> MutableMapping[str, Any]:  # noqa: ARG002
        """Pass a line on, or drop it."""
        kind, now = str(event_dict.get("event")), self._clock()
        with self._lock:
            since, count = self._counts.get(kind, (now, 0))
            if now - since >= 1:
                if count > self._most:
                    event_dict["suppressed"] = count - self._most
                since, count = now, 0
            self._counts[kind] = since, count + 1
        if count >= self._most:
            raise structlog.DropEvent
        return event_dict
