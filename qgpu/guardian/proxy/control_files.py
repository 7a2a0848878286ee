"""Bounds the open files on which pods make clients: each takes ten of the epoll watches that a user may have.

Files close unseen. So those that were added are counted, and now and then those that are open are listed.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

from qgpu.linux import fd_budget
from qgpu.linux.open_file_set import WATCHES, FileMakers

#: How many files all pods may have, and how many a pod may have whatever others do. A CUDA process has about 15.
_MOST, _GUARANTEED = 1 << 15, 256
_MAX_USER_WATCHES = Path("/proc/sys/fs/epoll/max_user_watches")
#: Listing the files takes 1/_PARTS of the time at most: nobody can make a client meanwhile.
_PARTS = 20
TOO_MANY = "too many control files"


class ControlFiles:
    """How many files of each pod are noted in ``FileMakers``."""

    def __init__(self, makers: Callable[[], FileMakers], clock: Callable[[], int]) -> None:
        self._makers, self._clock = makers, clock
        self._most = min(_MOST, _all_watches() // 2 // WATCHES)
        self._listing = threading.Lock()
        #: When files may be listed again; None if they never were.
        self._due_ns: int | None = None

    def has_room(self, pod: str, most: int = _MOST) -> bool:
        """Tell whether a pod may have another file; list those that are open before saying no. Call without the lock.

        A new guardian lists them first, because it has the files of the last one.
        """
        if self._due_ns is None or not self._fits(pod, most):
            self._list()
        return self._fits(pod, most)

    def _fits(self, pod: str, most: int) -> bool:
        makers = self._makers()
        own, left = makers.count(mark_of(pod)), self._most - makers.count()
        return own < most and fd_budget.within_fair_share(own, left, _GUARANTEED)

    def _list(self) -> None:
        with self._listing:
            began_ns = self._clock()
            if self._due_ns is None or began_ns >= self._due_ns:
                self._makers().recount()
                self._due_ns = began_ns + _PARTS * (self._clock() - began_ns)


def mark_of(pod: str) -> int:
    """Return the mark of a pod's files: whatever guardian counts them, it is the same."""
    return int.from_bytes(hashlib.sha256(pod.encode()).digest()[:8], "little")


def _all_watches() -> int:
    try:
        return int(_MAX_USER_WATCHES.read_text())
    except (OSError, ValueError):
        return 2 * WATCHES * _MOST
