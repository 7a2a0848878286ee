"""Keeps a pod's calls rare for which RM holds its lock long: gates and neighbours wait meanwhile.

Such calls may take 1/_PARTS of the time in the long run. A single one delays the next by at most _MOST_REST_NS, or a
few times that. A pod may be _AHEAD_NS ahead, because libcuda preempts twice in a row when a context ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_PARTS, _MOST_REST_NS, _AHEAD_NS = 21, 10**9, 2 * 10**7


class RareCalls:
    """The time that one pod's rare calls took."""

    def __init__(self) -> None:
        #: When the pod has waited long enough for those so far.
        self._due_ns = 0

    def wait(self) -> None:
        """Wait until the pod may make another one."""
        time.sleep(max(0, self._due_ns - _AHEAD_NS - time.monotonic_ns()) / 1e9)

    @contextmanager
    def timed(self, times: int = 1) -> Iterator[None]:
        """Count the time that the block takes, so many ``times``."""
        begun_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._count(begun_ns, times * min(_PARTS * (time.monotonic_ns() - begun_ns), _MOST_REST_NS))

    @contextmanager
    def worked(self, least_ns: int) -> Iterator[None]:
        """Count the time that the block takes on a CPU, if it is ``least_ns`` or more; not its waits for RM's lock."""
        begun_ns, before_ns = time.monotonic_ns(), time.thread_time_ns()
        try:
            yield
        finally:
            if (took_ns := time.thread_time_ns() - before_ns) >= least_ns:
                self._count(begun_ns, min(_PARTS * took_ns, _MOST_REST_NS))

    def expect(self, ns: int) -> None:
        """Count a call that the kernel is about to make, and that may take so long."""
        self._count(time.monotonic_ns(), min(_PARTS * ns, _MOST_REST_NS))

    def _count(self, begun_ns: int, rest_ns: int) -> None:
        self._due_ns = max(self._due_ns, begun_ns) + rest_ns
