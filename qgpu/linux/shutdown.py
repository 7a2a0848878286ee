"""Shutdown on a signal, in a form that a signal handler may set.

``threading.Event`` is not suitable. A waiting thread takes its lock now and then, and a handler that runs in that
thread at that moment waits for the lock for ever.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time

_MS_PER_S = 1000
#: How long one poll lasts at most. A signal that comes right before a poll, or to another thread, does not interrupt
#: it; Python runs the handler when the poll is over.
_LONGEST_S = 1.0


class Shutdown:
    """Set once a signal has arrived or ``set`` is called; any thread may wait for it."""

    def __init__(self, *signals: signal.Signals) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for number in signals:
            signal.signal(number, lambda *_: self.set())

    def set(self) -> None:
        """Request the shutdown."""
        os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the shutdown is requested, or for this long; tell whether it is."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, end_s - time.monotonic())
            if poll.poll(min(left_s, _LONGEST_S) * _MS_PER_S):
                return True
            if left_s <= _LONGEST_S:
                return False
