"""Descriptors that others sent us: told apart without asking their files, closed where nobody waits for it.

The last close of a file may take as long as whoever made it likes: a socket waits for its peer (SO_LINGER, socket(7)),
a FUSE file for its server. That goes for descriptors in a socket's queue too, which close with the socket, received or
not. So they are closed by a thread that nobody waits for, and never under a lock. One that waits is roused by a signal,
after which a socket waits no longer; a FUSE file holds up its thread.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from contextlib import suppress

#: Threads at a time; what comes beyond stays open until one of them is free.
_MOST = 64
#: How long a close may wait before it is roused.
_PATIENCE_S = 0.2
#: Its default is to be ignored, so it is nobody else's.
_ROUSE = signal.SIGURG

_lock = threading.Lock()
_waiting: deque[tuple[int, ...]] = deque()
#: Threads that close; those of them that are ours; and whether one that rouses them runs.
_closing: set[threading.Thread] = set()
_ours: set[threading.Thread] = set()
_rousing = False


def prepare() -> None:
    """Have waiting closes roused; to be called once, by the main thread."""
    signal.signal(_ROUSE, lambda *_: None)


def close(*fds: int) -> None:
    """Close descriptors by a thread of their own; returns at once."""
    with _lock:
        _waiting.append(fds)
        if len(_ours) >= _MOST:
            return
        thread = threading.Thread(target=_close, name="qgpu-close", daemon=True)
        _ours.add(thread)
    try:
        thread.start()
    except RuntimeError:  # no more threads are to be had: the next close has these closed too
        with _lock:
            _ours.discard(thread)


def close_here(*fds: int) -> None:
    """Close descriptors by a thread that serves only who sent them, however long that takes."""
    mine = threading.current_thread()
    with _lock:
        _closing.add(mine)
    _have_roused()
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
    with _lock:
        _closing.discard(mine)


def kind(fd: int) -> str:
    """Return what the kernel calls a descriptor, such as "anon_inode:seccomp notify"; its file is not asked.

    Whoever made it has no say in that: a file's name begins with "/".
    """
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _close() -> None:
    while True:
        with _lock:
            if not _waiting:
                _ours.discard(threading.current_thread())
                return
            fds = _waiting.popleft()
        close_here(*fds)


def _have_roused() -> None:
    global _rousing
    with _lock:
        if _rousing:
            return
        _rousing = True
    try:
        threading.Thread(target=_rouse, name="qgpu-rouse", daemon=True).start()
    except RuntimeError:
        with _lock:
            _rousing = False


def _rouse() -> None:
    """Rouse closes that wait, until there are none."""
    global _rousing
    pause = threading.Event()
    before: set[threading.Thread] = set()
    while True:
        pause.wait(_PATIENCE_S)
        with _lock:  # none of them ends meanwhile
            if not _closing:
                _rousing = False
                return
            if signal.getsignal(_ROUSE) not in (signal.SIG_DFL, signal.SIG_IGN, None):
                for ident in (thread.ident for thread in _closing & before):
                    if ident is not None:
                        signal.pthread_kill(ident, _ROUSE)
            before = set(_closing)
