"""Sets of open files that keep none of them open: a file leaves its set when its last descriptor closes anywhere.

An epoll remembers them. It registers a file under one descriptor number of ours, and drops it by itself. Only we can
remove a file, and a duplicate of a descriptor or one in another process is still the same file. One epoll holds all
sets, each under its own descriptor numbers. The numbers never change, so a guardian that gets the epoll has the sets.
"""

from __future__ import annotations

import os
import select
import struct
import threading
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from cffi import FFI

#: Process numbers are below 2**22 (PID_MAX_LIMIT): six digits to base 16.
_DIGITS, _BASE = 6, 16
#: The descriptor numbers under which epoll registers files: for tied files, for those of which it is known who makes
#: clients on them, for each digit of that process's number, for root clients, for devices, for exported memory.
_MAKERS = range(1000 - _DIGITS * _BASE, 1000)
_TIED, _CLAIMED = _MAKERS.start - 2, _MAKERS.start - 1
_ROOTS, _DEVICES = 1000, 1001
#: How many exports of one file can be told apart.
_CARRIERS = range(1002, 1010)
#: How many places hold a control file at most: the digits, and as claimed, tied, with a root client, with a device.
WATCHES = _DIGITS + 4
_ADD, _DELETE = 1, 2
#: struct epoll_event is packed on x86-64 only (linux/eventpoll.h).
_EVENT = struct.Struct("<IQ" if os.uname().machine == "x86_64" else "<I4xQ")

#: One thread at a time uses such a number, in whichever set.
_lock = threading.RLock()
#: A process number that no process has.
_NOBODY = 0
# A new control file takes some twenty calls, and ctypes takes longer.
_ffi: Any = FFI()
_ffi.cdef("int epoll_ctl(int epoll, int what, int fd, const char *event);")
_epoll_ctl = _ffi.dlopen(None).epoll_ctl


@cache
def _nothing() -> int:
    """Return the file that occupies a set's number when it is unused; kept open, so that this needs no descriptor."""
    return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)


class FileSet:
    """One set; each file in it has a mark, a number below 2**64."""

    def __init__(self, epoll: int, *places: int) -> None:
        self._epoll = epoll
        self._places = places

    def add(self, file: int, mark: int = 0) -> bool:
        """Add the open file behind a descriptor; False if it is in the set as often as it can be.

        Raises OSError, for example for a file that cannot be polled; the driver's files can.
        """
        for place in self._places:
            with _lock, suppress(FileExistsError):
                self._control(_ADD, place, file, mark)
                return True
        return False

    def discard(self, file: int) -> bool:
        """Remove a file from a set that holds each file once; False if it was not there."""
        with _lock, suppress(FileNotFoundError, PermissionError):
            self._control(_DELETE, self._places[0], file)
            return True
        return False

    def has(self, file: int) -> bool:
        """Tell whether a file is in the set. Raises OSError as ``add`` does."""
        with _lock:
            try:
                self._control(_ADD, self._places[0], file)
            except FileExistsError:
                return True
            self._control(_DELETE, self._places[0], file)
        return False

    def marks(self) -> set[int]:
        """Return the marks of all files that are still open somewhere. Takes long with many files."""
        return set(_marks_at(self._epoll, self._places))

    def _control(self, what: int, place: int, file: int, mark: int = 0) -> None:
        """Add or delete a file under one of this set's numbers. Raises OSError."""
        os.dup2(file, place, inheritable=False)
        try:
            if _epoll_ctl(self._epoll, what, place, _EVENT.pack(0, mark)) < 0:
                raise OSError(_ffi.errno, os.strerror(_ffi.errno))
        finally:
            os.dup2(_nothing(), place, inheritable=False)


def _marks_at(epoll: int, places: Container[int]) -> Iterator[int]:
    """List the marks of the files that an epoll holds at some places."""
    with Path(f"/proc/self/fdinfo/{epoll}").open() as lines:
        for line in lines:
            words = line.split()
            if words[:1] == ["tfd:"] and int(words[1]) in places:
                yield int(words[5], 16)


class FileMakers:
    """Which process makes clients on a file: for each digit of its number, the set of files with that digit.

    Epoll cannot be asked for a file's mark without a look at all files.
    """

    def __init__(self, epoll: int) -> None:
        self._epoll = epoll
        #: By mark, the files that were open when they were listed, and those that were added since.
        self._listed, self._added = Counter[int](), Counter[int]()
        self._claimed = FileSet(epoll, _CLAIMED)
        self._digits = [[FileSet(epoll, place) for place in _MAKERS[at::_DIGITS]] for at in range(_DIGITS)]

    def claim(self, file: int, pid: int, mark: int) -> bool:
        """Note a process as the one that makes clients on a file; False if another one does. Raises OSError.

        Files are counted by ``mark``.
        """
        with _lock:
            if not self._claimed.add(file, mark):
                return self.is_by(file, pid)
            try:
                for files in self._of(pid):
                    files.add(file)
            except OSError:
                self.forget(file)
                raise
            self._added[mark] += 1
            return True

    def rule_out(self, file: int, mark: int) -> None:
        """Let no process be the one that makes clients on a file. Raises OSError."""
        with _lock:
            self.forget(file)
            self.claim(file, _NOBODY, mark)

    def count(self, mark: int | None = None) -> int:
        """Return how many files with a mark, or all, are noted.

        Files that were added since ``recount`` count even if they were closed or forgotten meanwhile.
        """
        with _lock:
            counts = self._listed, self._added
            return sum(each.total() if mark is None else each[mark] for each in counts)

    def recount(self) -> None:
        """Find out which files are still open somewhere. Takes long with many files."""
        with _lock:
            self._listed, self._added = self._listed + self._added, Counter()
        found = Counter(_marks_at(self._epoll, (_CLAIMED,)))
        with _lock:
            self._listed = found

    def is_by(self, file: int, pid: int) -> bool:
        """Tell whether this process is noted of a file. Raises OSError."""
        with _lock:
            return all(files.has(file) for files in self._of(pid))

    def forget(self, file: int) -> None:
        """Forget who makes clients on a file."""
        with _lock:
            for sets in self._digits if self._claimed.has(file) else ():
                any(files.discard(file) for files in sets)
            self._claimed.discard(file)

    def _of(self, pid: int) -> list[FileSet]:
        return [sets[pid // _BASE**at % _BASE] for at, sets in enumerate(self._digits)]


class FileSets:
    """All sets, in the epoll behind ``fd``; without ``fd``, they are new."""

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            with select.epoll() as epoll:
                fd = os.dup(epoll.fileno())
            os.set_inheritable(fd, False)
        self.fd = fd
        #: Control files on which a root client was made, and those on which a device was.
        self.roots = FileSet(fd, _ROOTS)
        self.devices = FileSet(fd, _DEVICES)
        self.makers = FileMakers(fd)
        #: Files that reach a control file's clients, and those control files.
        self.tied = FileSet(fd, _TIED)
        #: Files that carry exported memory.
        self.carriers = FileSet(fd, *_CARRIERS)
        _nothing()

    def forget_root(self, file: int) -> None:
        """Record that a file has no root client that the kernel made; one that reaches a device may have others.

        Of a tied file it stays known who makes clients: the other file goes by it, too.
        """
        if not self.devices.has(file) and not self.tied.has(file):
            self.makers.forget(file)
        self.roots.discard(file)


def reserve_fds() -> None:
    """Reserve the sets' descriptor numbers; call it before other descriptors arrive."""
    for place in (_TIED, _CLAIMED, *_MAKERS, _ROOTS, _DEVICES, *_CARRIERS):
        os.dup2(_nothing(), place, inheritable=False)
