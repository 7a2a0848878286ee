"""A value that one thread sets and others wait on."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Watched(Generic[_T]):
    """A value with a number that grows by every change. All methods may be called from any thread."""

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
        """Set the value, and wake all who wait if it is another one."""
        with self._changed:
            if value != self._value:
                self._value = value
                self._number += 1
                self._changed.notify_all()

    def wait(self, seen: int, timeout_s: float) -> int:
        """Wait until the number differs from ``seen``, or for this long; return the number."""
        with self._changed:
            self._changed.wait_for(lambda: self._number != seen or self._closed, timeout_s)
            return self._number

    def wake(self) -> None:
        """Wake all who wait, as if something had changed."""
        with self._changed:
            self._number += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all who wait, for good."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
