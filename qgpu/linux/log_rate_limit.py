"""Keeps a log from being flooded by those whose doings it tells of: so many lines of a kind a second and no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

#: Lines of one kind that are written in a second.
MOST = 20


class LogRateLimit:
    """A processor for structlog. The next line that is written says how many of its kind were left out before it."""

    def __init__(self, most: int = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        #: By kind: since when lines are counted, and how many there were.
        self._counts: dict[str, tuple[float, int]] = {}

    def __call__(self, logger: Any, name: str, event_dict: MutableMapping[str, Any]) -> MutableMapping[str, Any]:  # noqa: ARG002
        """Pass a line on, or leave it out."""
        kind, now = str(event_dict.get("event")), self._clock()
        with self._lock:
            since, count = self._counts.get(kind, (now, 0))
            if now - since >= 1:
                if count > self._most:
                    event_dict["left_out"] = count - self._most
                since, count = now, 0
            self._counts[kind] = since, count + 1
        if count >= self._most:
            raise structlog.DropEvent
        return event_dict
