"""Facts in memory that outlives the guardian: an anonymous file that the daemon holds too.

The first pages hold, for each listener, the call being handled, so that the next guardian can answer its stopped
thread. Then come facts, one JSON line each, and answers that are about to be given. A compaction writes the whole table
again behind the old lines, a few facts with each new line, and then moves the start in one aligned 8-byte store. A
reader therefore sees either the old journal or the new one, each complete.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain

import structlog

from qgpu.errors import AlreadyRunningError, RefusedError
from qgpu.guardian.accounting.rm_object import Fact
from qgpu.linux import killed_process
from qgpu.linux.seccomp_notify import SLOT_BYTES

_log = structlog.get_logger("guardian")

_PAGE = 4096
_HEAD = 16 * _PAGE
#: What an answer writes into a process's memory: addresses and bytes.
Writes = list[tuple[int, bytes]]

#: A slot: the listener's number, then its notification and that call's progress; and where the slots are.
_LISTENER, _STRIDE = struct.Struct("<q"), 96
_SLOTS = range(64, _HEAD - _STRIDE + 1, _STRIDE)
#: A compaction starts when the facts since the last one exceed this.
COMPACT_BYTES = 1 << 20
#: How many facts a compaction writes with each new line, or as many bytes as that has: no call waits for more.
_AT_A_TIME = 8
#: How many lines are parsed together.
_PARSED_AT_ONCE = 1000
_NOBODY = 0
#: How many owners there may be, all but one of them killed; and struct flock (asm-generic/fcntl.h).
_OWNERS, _FLOCK = 16, struct.Struct("@hhqqi4x")
_PUNCH_HOLE_KEEP_SIZE = 3  # linux/falloc.h
#: json.dumps would make an encoder for each line.
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_libc = ctypes.CDLL(None)


class Journal:
    """The journal on a descriptor: ``Journal()`` makes one, ``Journal(fd)`` continues one."""

    def __init__(self, fd: int | None = None) -> None:
        fresh = fd is None
        self.fd = os.memfd_create("qgpu-journal", os.MFD_CLOEXEC) if fd is None else fd
        if fresh:
            os.ftruncate(self.fd, _HEAD)
        self._page = mmap.mmap(self.fd, _HEAD)
        #: The first of them is where the journal starts.
        self._words = memoryview(self._page).cast("Q")
        if fresh:
            self._words[0] = _HEAD
        #: The line of the last answer, by listener.
        self._answers: dict[int, bytes] = {}
        #: Start of the journal that was read last; -1 before the first read.
        self._read_start = -1
        start = self._words[0]  # once: another process may move it
        self._end = self._compacted_end = start + len(self._lines_from(start))
        #: The rest of a compaction, and where it started.
        self._compaction: Iterator[Fact] | None = None
        self._compaction_start = self._end

    def own(self) -> None:
        """Become the journal's only writer, for the life of this process. Raises AlreadyRunningError.

        An owner locks one byte. A killed one may keep its lock for as long as a FUSE server likes, and its successor
        then locks another byte.
        """
        locked = any(self._lock(place) for place in range(_OWNERS))
        if locked and all(map(killed_process.is_over, chain.from_iterable(map(self._owner, range(_OWNERS))))):
            return
        fcntl.lockf(self.fd, fcntl.LOCK_UN)
        raise AlreadyRunningError("guardian: another process owns the journal")

    def _lock(self, place: int) -> bool:
        with suppress(OSError):
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            return True
        return False

    def _owner(self, place: int) -> list[int]:
        """Return the other process that has the lock on a byte, if there is one."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        kind, *_, pid = _FLOCK.unpack(fcntl.fcntl(self.fd, fcntl.F_GETLK, asked))
        return [] if kind == fcntl.F_UNLCK else [pid]

    def listeners(self) -> set[int]:
        """Return the numbers of all listeners."""
        return self._slots().keys() - {_NOBODY}

    def slot(self, listener: int) -> memoryview:
        """Return the memory for a listener's current notification. Raises RefusedError if there are too many."""
        slots = self._slots()
        if (at := slots.get(listener)) is None:
            if (at := slots.get(_NOBODY)) is None:
                raise RefusedError(f"{len(_SLOTS)} process trees of pods are being watched already; end some first")
            _LISTENER.pack_into(self._page, at, listener)
        at += _LISTENER.size
        return memoryview(self._page)[at : at + SLOT_BYTES]

    @property
    def free_slots(self) -> int:
        """Return how many more listeners fit."""
        return len(_SLOTS) - len(self.listeners())

    def release(self, listener: int) -> None:
        """Free the slot of a listener that is gone."""
        self._answers.pop(listener, None)
        if (at := self._slots().get(listener)) is not None:
            self._page[at : at + _STRIDE] = bytes(_STRIDE)

    def _slots(self) -> dict[int, int]:
        """Return where the slot of each listener is, and the first one that is nobody's."""
        return {int(_LISTENER.unpack_from(self._page, at)[0]): at for at in reversed(_SLOTS)}

    def append(self, fact: Fact) -> None:
        """Write one fact, and the next facts of a compaction."""
        self._append_line(_line(fact))

    def _append_line(self, line: bytes) -> None:
        """Write a line, and the next facts of a compaction, if one runs.

        A pod decides how long answers are: so what comes meanwhile is no more than what a compaction writes.
        """
        self._write_lines(line)
        if self._compaction is None:
            return
        facts, ended = bytearray(), True
        for count, fact in enumerate(self._compaction, 1):
            facts += _line(fact)
            if count >= _AT_A_TIME and len(facts) >= len(line):
                ended = False
                break
        try:
            self._write_lines(facts)
        except OSError as error:  # the old lines, and those behind them, still say everything
            _log.error("journal: not compacted", reason=str(error))
            self._compaction = None
        else:
            if ended:
                self._words[0], self._compaction = self._compaction_start, None
                self._compacted_end = self._end
                used = ctypes.c_long(self._compaction_start // _PAGE * _PAGE - _HEAD)
                _libc.fallocate(self.fd, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(_HEAD), used)

    def answer(self, listener: int, call: int, writes: Writes) -> None:
        """Write down the answer that a performed call is about to get."""
        areas = ",".join([f'[{address},"{data.hex()}"]' for address, data in writes])
        # A pod waits, and json takes three times as long.
        self._answers[listener] = line = f'{{"answer":[{listener},{call},[{areas}]]}}\n'.encode()
        self._append_line(line)

    def answer_to(self, listener: int, call: int) -> Writes | None:
        """Return the answer that a dead guardian was about to give to a call; None if it had none."""
        if (line := self._answers.get(listener)) is None:
            return None
        _, answered, writes = json.loads(line)["answer"]
        return [(address, bytes.fromhex(data)) for address, data in writes] if answered == call else None

    def _write_lines(self, lines: bytes | bytearray) -> None:
        """Write lines completely or not at all. Raises OSError, for example without memory for them."""
        written = 0
        while written < len(lines):
            written += os.pwrite(self.fd, lines[written:], self._end + written)
        self._end += len(lines)

    @property
    def should_compact(self) -> bool:
        """Tell whether to compact: when more would be dropped than written again."""
        new = self._end - self._compacted_end
        if new <= COMPACT_BYTES or self._compaction is not None:
            return False
        return new > self._compacted_end - self._words[0]

    def compact(self, facts: Iterator[Fact]) -> None:
        """Start again with ``facts``, written along with what is appended; each must be true when it is taken."""
        self._compaction, self._compaction_start = facts, self._end
        self._write_lines(b"".join(self._answers.values()))

    def _lines_from(self, at: int) -> bytes:
        """Read all lines from here on, except a last one that is incomplete: a crash may have cut it short."""
        data = os.pread(self.fd, os.fstat(self.fd).st_size - at, at)
        return data[: data.rfind(b"\n") + 1]

    def read(self, matters: Callable[[bytes], bool] = lambda _line: True) -> tuple[bool, Iterator[Fact]]:
        """Return (restart, facts): the new facts whose line ``matters``, while another process may be writing.

        ``restart`` means that all facts follow, and that those read before no longer count. It is set for the first
        read, and for a reader who is behind the start of the last compaction. Another reader has read its facts among
        the others: they state what is true when they are taken. A last line that is incomplete waits for the next read.
        """
        while True:
            start = self._words[0]
            restart = self._read_start < 0 or self._end < start
            at = start if restart else self._end
            data = self._lines_from(at)
            if self._words[0] == start:  # else a compaction has freed what was read
                break
        if start != self._read_start:
            self._compacted_end = start  # how much is obsolete is unknown: a long journal is compacted at once
        self._read_start = start
        self._end = at + len(data)
        if restart:
            self._answers.clear()
        return restart, self._facts([line for line in data.split(b"\n")[:-1] if matters(line)])

    def _facts(self, lines: list[bytes]) -> Iterator[Fact]:
        for at in range(0, len(lines), _PARSED_AT_ONCE):
            for line, fact in _parsed(lines[at : at + _PARSED_AT_ONCE]):
                if "answer" in fact:
                    self._answers[fact["answer"][0]] = line + b"\n"
                else:
                    yield fact


def _parsed(lines: list[bytes]) -> Iterator[tuple[bytes, Fact]]:
    """Yield lines with what they say; parsed at once, which takes half as long, unless one is damaged."""
    with suppress(ValueError):
        said = json.loads(b"[%s]" % b",".join(lines))
        if len(said) == len(lines):
            yield from zip(lines, said, strict=True)
            return
    for line in lines:
        try:
            yield line, json.loads(line)
        except ValueError:
            _log.error("journal: damaged line skipped", bytes=len(line))


def _line(said: Fact) -> bytes:
    return _encode(said).encode() + b"\n"
