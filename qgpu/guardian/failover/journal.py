"""Facts in memory that outlives the guardian: an anonymous file that the daemon holds too.

First pages: for each listener the call in hand, so that a thread stopped in it can be answered by the next
guardian. After them: facts, one JSON line each, and answers that are about to be given. A compaction writes the whole
register anew behind the old lines, a little with each new fact, and then moves the start in one aligned 8-byte store,
so a reader finds either all or all.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from itertools import islice

import structlog

from qgpu.errors import AlreadyRunningError, RefusedError
from qgpu.guardian.accounting.object_table import Fact
from qgpu.linux.seccomp_notify import SLOT_BYTES

_log = structlog.get_logger("guardian")

_PAGE = 4096
_HEAD = 16 * _PAGE
_START = struct.Struct("<Q")
#: What an answer puts into a process's memory: addresses and bytes.
Writes = list[tuple[int, bytes]]

#: A slot: the listener's number, then its notification and how far that has come.
_LISTENER = struct.Struct("<q")
_FIRST_SLOT, _SLOT_STRIDE = 64, 96
_SLOTS = (_HEAD - _FIRST_SLOT) // _SLOT_STRIDE
#: Lines are compacted when the facts since the last compaction exceed this.
COMPACT_BYTES = 1 << 20
#: How many facts are written anew with each that is appended: nobody waits for more.
_AT_A_TIME = 8
_NOBODY = 0
_PUNCH_HOLE_KEEP_SIZE = 3  # linux/falloc.h
_libc = ctypes.CDLL(None)


class Journal:
    """The journal on a descriptor: ``Journal()`` makes one, ``Journal(fd)`` goes on with one."""

    def __init__(self, fd: int | None = None) -> None:
        fresh = fd is None
        self.fd = os.memfd_create("qgpu-journal", os.MFD_CLOEXEC) if fd is None else fd
        if fresh:
            os.ftruncate(self.fd, _HEAD)
        self._page = mmap.mmap(self.fd, _HEAD)
        if fresh:
            _START.pack_into(self._page, 0, _HEAD)
        self._words = memoryview(self._page).cast("Q")
        #: By listener: the line of the last answer.
        self._answers: dict[int, bytes] = {}
        #: Where what has been read began; nothing has been.
        self._since = -1
        self._end = self._behind_last_line()
        self._compacted_end = self._end
        #: What is still to be written anew, and from where on it stands.
        self._anew: Iterator[Fact] | None = None
        self._anew_from = self._end

    def own(self) -> None:
        """Be the one process that writes it, for as long as it lives. Raises AlreadyRunningError."""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise AlreadyRunningError("guardian: another one has the journal") from error

    def listeners(self) -> set[int]:
        """Return the numbers of all listeners that there are."""
        owners = {int(_LISTENER.unpack_from(self._page, at)[0]) for at in self._slots()}
        return owners - {_NOBODY}

    def slot(self, listener: int) -> memoryview:
        """Return the memory for a listener's notification in hand. Raises RefusedError when there are too many."""
        at = self._slot_of(listener)
        if at is None:
            if (at := self._slot_of(_NOBODY)) is None:
                raise RefusedError(f"{_SLOTS} process trees of pods are being watched already; end some first")
            _LISTENER.pack_into(self._page, at, listener)
        return self._notification(at)

    @property
    def free_slots(self) -> int:
        """Return how many more listeners there may be."""
        return sum(_LISTENER.unpack_from(self._page, at) == (_NOBODY,) for at in self._slots())

    def release(self, listener: int) -> None:
        """Give up the slot of a listener that is gone."""
        self._answers.pop(listener, None)
        if (at := self._slot_of(listener)) is not None:
            self._page[at : at + _SLOT_STRIDE] = bytes(_SLOT_STRIDE)

    def _slot_of(self, listener: int) -> int | None:
        return next((at for at in self._slots() if _LISTENER.unpack_from(self._page, at) == (listener,)), None)

    def _slots(self) -> range:
        return range(_FIRST_SLOT, _FIRST_SLOT + _SLOTS * _SLOT_STRIDE, _SLOT_STRIDE)

    def _notification(self, slot_at: int) -> memoryview:
        at = slot_at + _LISTENER.size
        return memoryview(self._page)[at : at + SLOT_BYTES]

    def append(self, fact: Fact) -> None:
        """Write one fact down, and some of those that a compaction has still to write."""
        self._write([fact])
        self._write_some_anew()

    def _write_some_anew(self) -> None:
        """Go on with a compaction, if there is one."""
        if self._anew is None:
            return
        some = list(islice(self._anew, _AT_A_TIME))
        self._write(some)
        if len(some) < _AT_A_TIME:
            self._begin_anew()

    def answer(self, listener: int, call: int, writes: Writes) -> None:
        """Write down what a call that has been carried out is about to be answered with."""
        said = {"answer": [listener, call, [[address, data.hex()] for address, data in writes]]}
        self._answers[listener] = _line(said)
        self._write_lines(self._answers[listener])
        self._write_some_anew()

    def answer_to(self, listener: int, call: int) -> Writes | None:
        """Return what a dead guardian was about to answer to a call; None where it had not come so far."""
        if (line := self._answers.get(listener)) is None:
            return None
        _, answered, writes = json.loads(line)["answer"]
        return [(address, bytes.fromhex(data)) for address, data in writes] if answered == call else None

    def _write(self, facts: Iterable[Fact]) -> None:
        self._write_lines(b"".join(_line(fact) for fact in facts))

    def _write_lines(self, lines: bytes) -> None:
        """Write lines whole or not at all. Raises OSError, as when there is no memory for them."""
        written = 0
        while written < len(lines):
            written += os.pwrite(self.fd, lines[written:], self._end + written)
        self._end += len(lines)

    @property
    def grown(self) -> bool:
        """Tell whether it is time to compact: when there is more to drop than to write again."""
        (start,) = _START.unpack_from(self._page, 0)
        too_long = self._end - self._compacted_end > max(COMPACT_BYTES, self._compacted_end - int(start))
        return too_long and self._anew is None

    def compact(self, facts: Iterator[Fact]) -> None:
        """Begin again with ``facts``: they are written along with those that are appended from now on.

        So each must tell of the moment at which it is asked for.
        """
        self._anew, self._anew_from = facts, self._end
        self._write_lines(b"".join(self._answers.values()))

    @property
    def compacting(self) -> bool:
        """Tell whether facts are still being written anew."""
        return self._anew is not None

    def _begin_anew(self) -> None:
        self._words[0], self._anew = self._anew_from, None
        self._compacted_end = self._end
        used = ctypes.c_long(self._anew_from // _PAGE * _PAGE - _HEAD)
        _libc.fallocate(self.fd, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(_HEAD), used)

    def _behind_last_line(self) -> int:
        """Find where to go on writing: a death may have cut the last line short."""
        (start,) = _START.unpack_from(self._page, 0)
        end = os.fstat(self.fd).st_size
        data = os.pread(self.fd, end - start, start)
        return int(start) + data.rfind(b"\n") + 1

    def read(self) -> tuple[bool, Iterator[Fact]]:
        """Read the facts that were not read yet; True with all of them, where what was read before counts no more.

        Another may be writing it. A last line cut short, by a death for instance, is left for the next time.
        """
        while True:
            (start,) = _START.unpack_from(self._page, 0)
            at = self._end if start == self._since else int(start)
            data = os.pread(self.fd, os.fstat(self.fd).st_size - at, at)
            if _START.unpack_from(self._page, 0) == (start,):  # else there are holes where it has been compacted
                break
        anew, self._since = start != self._since, int(start)
        self._end = at + data.rfind(b"\n") + 1
        if anew:
            self._compacted_end = int(start)  # what of it is dropped, nobody knows: a long one is compacted at once
            self._answers.clear()
        return anew, self._facts(data.split(b"\n")[:-1])

    def _facts(self, lines: Iterable[bytes]) -> Iterator[Fact]:
        for line in lines:
            try:
                fact = json.loads(line)
            except ValueError:
                _log.error("journal: a line is damaged, and left out", bytes=len(line))
                continue
            if "answer" in fact:
                self._answers[fact["answer"][0]] = line + b"\n"
            else:
                yield fact


def _line(said: Fact) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"
