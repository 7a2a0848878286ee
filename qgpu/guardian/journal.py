"""Facts in memory that outlives the guardian: an anonymous file that the daemon holds too.

First page: which call was in hand (listener and notification), so that a thread stopped in it can be answered
by the next guardian. After it: facts, one JSON line each. A compaction writes the whole register anew behind
the old lines and then moves the start in one aligned 8-byte store, so a reader finds either all or all.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator

from qgpu.guardian.notify import SLOT_BYTES
from qgpu.guardian.register import Fact

_PAGE = 4096
_START = struct.Struct("<Q")
_LISTENER = struct.Struct("<q")
_SLOT_AT = 64
#: Lines are compacted when the facts since the last compaction exceed this.
COMPACT_BYTES = 1 << 20
_NOBODY = -1
_PUNCH_HOLE_KEEP_SIZE = 3  # linux/falloc.h
_libc = ctypes.CDLL(None)


class Journal:
    """The journal on a descriptor: ``Journal()`` makes one, ``Journal(fd)`` goes on with one."""

    def __init__(self, fd: int | None = None) -> None:
        fresh = fd is None
        self.fd = os.memfd_create("qgpu-journal", os.MFD_CLOEXEC) if fd is None else fd
        if fresh:
            os.ftruncate(self.fd, _PAGE)
        self._page = mmap.mmap(self.fd, _PAGE)
        if fresh:
            _START.pack_into(self._page, 0, _PAGE)
            _LISTENER.pack_into(self._page, 8, _NOBODY)
        self._words = memoryview(self._page).cast("Q")
        self._end = self._behind_last_line()
        self._compacted_end = self._end

    @property
    def slot(self) -> memoryview:
        """Memory for the notification in hand."""
        return memoryview(self._page)[_SLOT_AT : _SLOT_AT + SLOT_BYTES]

    def in_hand(self, listener: int) -> None:
        """Write down whose notification is about to be received; ``-1`` for nobody's."""
        _LISTENER.pack_into(self._page, 8, listener)

    def unanswered(self) -> tuple[int, int] | None:
        """Return (listener, notification id) that a guardian left unanswered when it died."""
        (listener,) = _LISTENER.unpack_from(self._page, 8)
        (id_,) = struct.unpack_from("<Q", self._page, _SLOT_AT)
        return (listener, id_) if listener != _NOBODY and id_ else None

    def append(self, fact: Fact) -> None:
        """Write one fact down."""
        line = json.dumps(fact, separators=(",", ":")).encode() + b"\n"
        os.pwrite(self.fd, line, self._end)
        self._end += len(line)

    @property
    def grown(self) -> bool:
        """Tell whether it is time to compact: when there is more to drop than to write again."""
        (start,) = _START.unpack_from(self._page, 0)
        return self._end - self._compacted_end > max(COMPACT_BYTES, self._compacted_end - int(start))

    def compact(self, facts: Iterable[Fact]) -> None:
        """Begin again with ``facts``."""
        start = self._end
        for fact in facts:
            self.append(fact)
        self._words[0] = start
        self._compacted_end = self._end
        used = ctypes.c_long(start // _PAGE * _PAGE - _PAGE)
        _libc.fallocate(self.fd, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(_PAGE), used)

    def _behind_last_line(self) -> int:
        """Find where to go on writing: a death may have cut the last line short."""
        (start,) = _START.unpack_from(self._page, 0)
        end = os.fstat(self.fd).st_size
        data = os.pread(self.fd, end - start, start)
        return int(start) + data.rfind(b"\n") + 1

    def replay(self) -> Iterator[Fact]:
        """Read every fact since the last compaction; a last line cut short by a death is left out."""
        (start,) = _START.unpack_from(self._page, 0)
        data = os.pread(self.fd, self._end - start, start)
        for line in data.split(b"\n")[:-1]:
            yield json.loads(line)
