"""Lets members of the socket's group ask for what takes the pods' lock, or lists all pods, one at a time.

So root's requests and the daemon's own work wait for one of them at most, however many connections members have. Guests
have a turn of their own (``qgpu/ipc/control_socket.py``). What is recorded has a pace as well, or a burst of it would
hide a change: the log leaves out lines of a kind that come too fast, and the record holds a limited number.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from qgpu.daemon import caller
from qgpu.ipc import subordinate_uids
from qgpu.ipc.control_socket import Session

#: The next member waits for as long as the last one took, or this long if that is less: others get the lock meanwhile.
_MOST_PAUSE_S = 1.0
#: The least time between two recorded requests of members. One that fails has two lines in the log, which takes
#: ``qgpu.linux.log_rate_limit.MOST`` of a kind per second.
PACE_S = 0.125


class SocketGroupTurn:
    """A turn that one member of the socket's group has at a time. Whoever waits for it holds no lock."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        #: A user's requests wait for each other first, so that a user with many of them delays others by one.
        self._users: dict[str, threading.Lock] = {}
        self._next_s = 0.0
        self._pace, self._next_recorded_s = threading.Lock(), 0.0

    @contextmanager
    def __call__(self, session: Session) -> Iterator[None]:
        """Hold the turn for a block, if the client needs one."""
        if caller.is_own(session) or not session.may_change:
            yield
            return
        with self._users_lock(session), self._turn:
            time.sleep(max(0.0, self._next_s - time.monotonic()))
            began_s = time.monotonic()
            try:
                yield
            finally:
                now_s = time.monotonic()
                self._next_s = now_s + min(now_s - began_s, _MOST_PAUSE_S)

    def await_pace(self, session: Session) -> None:
        """Wait until a request of the client's may be recorded. It holds no turn."""
        if caller.is_own(session) or not session.may_change:
            return
        with self._users_lock(session), self._pace:
            time.sleep(max(0.0, self._next_recorded_s - time.monotonic()))
            self._next_recorded_s = time.monotonic() + PACE_S

    def _users_lock(self, session: Session) -> threading.Lock:
        return self._users.setdefault(subordinate_uids.owner(session.peer.uid), threading.Lock())
