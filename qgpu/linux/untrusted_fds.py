"""Descriptors that other processes sent us: identified without asking their files, and closed without waiting.

The last close of a file may take as long as its maker likes: a socket waits for its peer (SO_LINGER, socket(7)), a FUSE
file for its server. This also applies to unreceived descriptors in a socket's queue, which close with the socket. So a
thread of a pool closes them, never under a lock. A signal interrupts a close that waits; a socket then stops waiting,
but a FUSE file keeps its thread.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from contextlib import suppress

#: The most threads at a time; further descriptors stay open until one is free.
_MOST = 64
#: How long a close may wait before a signal interrupts it.
_PATIENCE_S = 0.2
#: The default action of this signal is to ignore it, so no other code relies on it.
_INTERRUPT = signal.SIGURG

_lock = threading.Lock()
_waiting: deque[tuple[int, ...]] = deque()
#: Threads that close, those of them that we started, and whether the interrupting thread runs.
_closing: set[threading.Thread] = set()
_ours: set[threading.Thread] = set()
_interrupting = False


def install_signal_handler() -> None:
    """Install the signal handler for interrupting closes; the main thread calls this once."""
    signal.signal(_INTERRUPT, lambda *_: None)


def close(*fds: int) -> None:
    """Close descriptors in a separate thread; return at once."""
    with _lock:
        _waiting.append(fds)
        if len(_ours) >= _MOST:
            return
        thread = threading.Thread(target=_close, name="qgpu-close", daemon=True)
        _ours.add(thread)
    try:
        thread.start()
    except RuntimeError:  # no thread is available: the next close also closes these
        with _lock:
            _ours.discard(thread)


def close_here(*fds: int) -> None:
    """Close descriptors in the calling thread, which serves only their sender, however long that takes."""
    mine = threading.current_thread()
    with _lock:
        _closing.add(mine)
    _ensure_interrupter()
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
    with _lock:
        _closing.discard(mine)


def kind(fd: int) -> str:
    """Return the kernel's name for a descriptor, such as "anon_inode:seccomp notify", without asking its file.

    The file's maker cannot fake it: a file's name begins with "/".
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


def _ensure_interrupter() -> None:
    global _interrupting
    with _lock:
        if _interrupting:
            return
        _interrupting = True
    try:
        threading.Thread(target=_interrupt_closes, name="qgpu-interrupt", daemon=True).start()
    except RuntimeError:
        with _lock:
            _interrupting = False


def _interrupt_closes() -> None:
    """Interrupt waiting closes until there are none."""
    global _interrupting
    pause = threading.Event()
    before: set[threading.Thread] = set()
    while True:
        pause.wait(_PATIENCE_S)
        with _lock:  # none of them ends while the lock is held
            if not _closing:
                _interrupting = False
                return
            if signal.getsignal(_INTERRUPT) not in (signal.SIG_DFL, signal.SIG_IGN, None):
                for ident in (thread.ident for thread in _closing & before):
                    if ident is not None:
                        signal.pthread_kill(ident, _INTERRUPT)
            before = set(_closing)
