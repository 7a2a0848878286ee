"""The end that a signal asks for, in the form that a signal's handler may set.

``threading.Event`` is none: who waits takes its lock now and then, and a handler that runs in that moment, in the same
thread, waits for that lock for ever.
"""

from __future__ import annotations

import os
import select
import signal

_MS_PER_S = 1000


class Shutdown:
    """Set once one of the signals has come, or somebody says so; anybody may wait for it."""

    def __init__(self, *signals: signal.Signals) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for number in signals:
            signal.signal(number, lambda *_: self.set())

    def set(self) -> None:
        """Ask for the end."""
        os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is asked for, or so long; tell whether it is."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * _MS_PER_S))
