"""Open files that were seen before, none of them kept open by it: one is forgotten when its last descriptor closes.

It is epoll that remembers: what it was given once under a number of ours, it does not take again under that number,
and it lets go of a file by itself. Nobody but us can make it forget, and a file passed on, or with another number,
is the same file.
"""

from __future__ import annotations

import os
import select
import threading
from dataclasses import dataclass, field
from io import FileIO


def _nothing() -> FileIO:
    return FileIO("/dev/null")


@dataclass(slots=True)
class SeenFiles:
    """A set of open files."""

    _epoll: select.epoll = field(default_factory=select.epoll)
    #: Its number is the one under which all files are given to epoll.
    _place: FileIO = field(default_factory=_nothing)
    #: What is there when no file is: kept, for letting go must not need a descriptor.
    _empty: FileIO = field(default_factory=_nothing)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, file: int) -> bool:
        """Take note of the open file behind a descriptor; False when it is known.

        Raises OSError, as for a file that cannot be polled; the driver's can.
        """
        with self._lock:
            os.dup2(file, self._place.fileno(), inheritable=False)
            try:
                self._epoll.register(self._place.fileno(), 0)
            except FileExistsError:
                return False
            finally:
                self._let_go()
        return True

    def discard(self, file: int) -> None:
        """Forget a file."""
        with self._lock:
            os.dup2(file, self._place.fileno(), inheritable=False)
            try:
                self._epoll.unregister(self._place.fileno())
            except OSError:  # it is not known
                pass
            finally:
                self._let_go()

    def has(self, file: int) -> bool:
        """Tell whether a file is known. Raises OSError as ``add`` does."""
        if not self.add(file):
            return True
        self.discard(file)
        return False

    def _let_go(self) -> None:
        os.dup2(self._empty.fileno(), self._place.fileno(), inheritable=False)
