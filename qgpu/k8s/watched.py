"""A value that one thread sets and others wait on."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Watched(Generic[_T]):
    """A value and the number of its changes. Any thread may call any method."""

    def __init__(self, value: _T) -> None:
        self._changed = threading.Condition()
        self._value, self._number, self._closed = value, 0, False

    @property
    def value(self) -> _T:
        """Return the value that was last set."""
        with self._changed:
            return self._value

    @property
    def closed(self) -> bool:
        """Tell whether ``close`` was called."""
        with self._changed:
            return self._closed

    def set(self, value: _T) -> None:
        """Set the value; if it differs from the last one, wake all waiting threads."""
        with self._changed:
            if value != self._value:
                self._value = value
                self._number += 1
                self._changed.notify_all()

    def wait(self, seen: int, timeout_s: float) -> int:
        """Wait until the number of changes differs from ``seen``, at most ``timeout_s``; return the number."""
        with self._changed:
            self._changed.wait_for(lambda: self._number != seen or self._closed, timeout_s)
            return self._number

    def wake(self) -> None:
        """Wake all waiting threads, as if the value had changed."""
        with self._changed:
            self._number += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiting threads; nothing waits from then on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
