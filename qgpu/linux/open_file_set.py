"""Sets of open files that keep none of them open: a file leaves its set when its last descriptor closes, wherever.

It is epoll that remembers: it takes a file once under one number of ours, and lets go of it by itself. Nobody but us
can make it forget, and a file passed on, or with another number, is the same file. All sets are in one epoll, each
under a number of its own. These numbers never change, so a guardian that is handed the epoll has the sets.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

#: Under which numbers files are given to epoll: for root clients, for devices, for what carries exported memory.
_ROOTS, _DEVICES = 1000, 1001
#: So many exports a file may carry that are told apart.
_CARRIERS = range(1002, 1010)
_ADD, _DELETE = 1, 2
#: struct epoll_event is packed on x86-64 only (linux/eventpoll.h).
_EVENT = struct.Struct("<IQ" if os.uname().machine == "x86_64" else "<I4xQ")

#: A number is used for a moment by one thread at a time, whichever set it is for.
_lock = threading.Lock()
_libc = ctypes.CDLL(None, use_errno=True)


@cache
def _nothing() -> int:
    """Return what is under a set's number while no file is: kept, because letting go must not need a descriptor."""
    return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)


class FileSet:
    """One of the sets; each file in it has a mark, a number below 2**64."""

    def __init__(self, epoll: int, *places: int) -> None:
        self._epoll = epoll
        self._places = places

    def add(self, file: int, mark: int = 0) -> bool:
        """Take note of the open file behind a descriptor; False when it is known, as often as it can be.

        Raises OSError, as for a file that cannot be polled; the driver's can.
        """
        for place in self._places:
            with _lock, suppress(FileExistsError):
                self._control(_ADD, place, file, mark)
                return True
        return False

    def discard(self, file: int) -> None:
        """Forget a file of a set in which each is once."""
        with _lock, suppress(FileNotFoundError, PermissionError):
            self._control(_DELETE, self._places[0], file)

    def has(self, file: int) -> bool:
        """Tell whether a file is known. Raises OSError as ``add`` does."""
        with _lock:
            try:
                self._control(_ADD, self._places[0], file)
            except FileExistsError:
                return True
            self._control(_DELETE, self._places[0], file)
        return False

    def marks(self) -> set[int]:
        """Return the marks of all files that are still open somewhere. Takes long where these are many."""
        found = set()
        for line in Path(f"/proc/self/fdinfo/{self._epoll}").read_text().split("\n"):
            words = line.split()
            if words[:1] == ["tfd:"] and int(words[1]) in self._places:
                found.add(int(words[5], 16))
        return found

    def _control(self, what: int, place: int, file: int, mark: int = 0) -> None:
        """Do something to a file under a number of this set's. Raises OSError."""
        os.dup2(file, place, inheritable=False)
        try:
            event = ctypes.create_string_buffer(_EVENT.pack(0, mark), _EVENT.size)
            if _libc.epoll_ctl(self._epoll, what, place, event) < 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
        finally:
            os.dup2(_nothing(), place, inheritable=False)


class FileSets:
    """All sets, in the epoll behind ``fd``; without one, they are new."""

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            with select.epoll() as epoll:
                fd = os.dup(epoll.fileno())
            os.set_inheritable(fd, False)
        self.fd = fd
        #: Control files on which a root client was made, and those on which a device was.
        self.roots = FileSet(fd, _ROOTS)
        self.devices = FileSet(fd, _DEVICES)
        #: Files that carry exported memory.
        self.carriers = FileSet(fd, *_CARRIERS)
        _nothing()


def occupy() -> None:
    """Keep the sets' numbers for them. A process that is handed many descriptors does so first."""
    for place in (_ROOTS, _DEVICES, *_CARRIERS):
        os.dup2(_nothing(), place, inheritable=False)
