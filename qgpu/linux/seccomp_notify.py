"""Seccomp user notifications: receive a stopped system call, read its process's memory, answer it.

The kernel side is linux/seccomp.h and seccomp_unotify(2). A thread stays stopped until it gets an answer, so the
listener's owner must never lose a notification. The kernel itself writes the notification to memory that outlives this
process (``slot``), before this code sees it.
"""

from __future__ import annotations

import errno
import os
import select
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cffi import FFI

_ffi: Any = FFI()
_ffi.cdef(
    """
    struct seccomp_data { int nr; uint32_t arch; uint64_t ip; uint64_t args[6]; };
    struct seccomp_notif { uint64_t id; uint32_t pid, flags; struct seccomp_data data; };
    struct seccomp_notif_resp { uint64_t id; int64_t val; int32_t error; uint32_t flags; };
    struct seccomp_notif_addfd { uint64_t id; uint32_t flags, srcfd, newfd, newfd_flags; };
    struct iovec { void *base; size_t len; };
    struct remote_iovec { uint64_t base; size_t len; };
    int ioctl(int fd, unsigned long request, void *argument);
    int tgkill(int pid, int tid, int signal);
    ssize_t process_vm_readv(int pid, const struct iovec *local, unsigned long n, const struct remote_iovec *remote,
                             unsigned long m, unsigned long flags);
    ssize_t process_vm_writev(int pid, const struct iovec *local, unsigned long n, const struct remote_iovec *remote,
                              unsigned long m, unsigned long flags);
    """
)
_libc: Any = _ffi.dlopen(None)

#: struct seccomp_notif: id, pid, flags; and of struct seccomp_data nr, arch, ip, six arguments.
_NOTIF = struct.Struct("<QIIiIQ6Q")
_NOTIF_BYTES = _NOTIF.size
#: A notification, and its call's progress.
SLOT_BYTES = _NOTIF_BYTES + 8
_EMPTY = bytes(SLOT_BYTES)
#: Progress of a call: begun, or begun after RM gave a figure (the mark minus _BEGUN_AT).
_BEGUN, _BEGUN_AT = 1, 2
_RECV = 0xC0502100
_SEND = 0xC0182101
_ID_VALID = 0x40082102
_ADDFD = 0x40182103
_SET_FLAGS = 0x40082104
_SYNC_WAKE_UP = 1
_CONTINUE = 1
#: No page is smaller. One system call writes at most this many areas, and reads at most this many bytes.
_PAGE, _MOST_AREAS, _MOST_READ = 4096, 64, 1 << 16

#: Threads whose calls were received and not answered yet: such a thread has left the call before.
RECEIVED: set[int] = set()
#: The listener of each thread of ours.
_own = threading.local()


def another_call_waits() -> bool:
    """Tell whether a call may wait until this thread of ours, which serves a listener, receives it."""
    if (fd := getattr(_own, "fd", None)) is None:
        return True
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


@dataclass(slots=True)  # not frozen: one is made per call, and freezing takes three times as long
class Notification:
    """One stopped system call: its thread, its number on an architecture, its arguments."""

    id: int
    tid: int
    arch: int
    number: int
    arguments: tuple[int, ...]

    def asks_as(self, other: Notification) -> bool:
        """Tell whether two calls are alike, as a call and its restart after a signal are; their files may differ."""
        return (self.arch, self.number, self.arguments) == (other.arch, other.number, other.arguments)

    @property
    def fd(self) -> int:
        """The descriptor of an ioctl."""
        return self.arguments[0] & 0xFFFFFFFF

    @property
    def request(self) -> int:
        """The request of an ioctl, of which the kernel uses 32 bits."""
        return self.arguments[1] & 0xFFFFFFFF

    @property
    def argument(self) -> int:
        """The address of an ioctl's argument."""
        return self.arguments[2]


@dataclass(frozen=True, slots=True)
class UnansweredCall:
    """A call that a guardian had received when it died, and its progress.

    If it had ``begun``, it may have been performed or not; ``before`` is RM's figure from just before, if it was read.
    """

    call: Notification
    begun: bool
    before: int | None


def read_slot(slot: memoryview) -> UnansweredCall | None:
    """Read a slot; None if it is empty."""
    if (call := _notification(slot)) is None:
        return None
    mark = int.from_bytes(slot[_NOTIF_BYTES:SLOT_BYTES], "little")
    return UnansweredCall(call, mark >= _BEGUN, mark - _BEGUN_AT if mark >= _BEGUN_AT else None)


def _notification(slot: memoryview) -> Notification | None:
    id_, tid, _, number, arch, _, *arguments = _NOTIF.unpack_from(slot)
    return Notification(id_, tid, arch, number, tuple(arguments)) if id_ else None


def is_listener(fd: int) -> bool:
    """Tell whether a descriptor is a seccomp listener: another file might be readable for ever."""
    return has_call(fd, 0) or _ffi.errno == errno.ENOENT


def has_call(fd: int, id_: int) -> bool:
    """Tell whether a call that somebody received from this listener still waits. Ids start at random."""
    return bool(_libc.ioctl(fd, _ID_VALID, _ffi.new("uint64_t *", id_)) == 0)


class Listener:
    """One pod's listener descriptor, by its number. ``slot`` is SLOT_BYTES of shared memory for the call in hand."""

    def __init__(self, fd: int, slot: memoryview, number: int = 0) -> None:
        self.fd = fd
        self.number = number
        self._slot = slot
        self._notif = _ffi.cast("struct seccomp_notif *", _ffi.from_buffer(slot, require_writable=True))
        self._mark = _ffi.cast("uint64_t *", self._notif + 1)
        self._valid = _ffi.new("uint64_t *")
        self._answer = _ffi.new("struct seccomp_notif_resp *")
        if self._notif.id and self.still_waiting(self._notif.id):  # a dead guardian received it
            RECEIVED.add(self._notif.pid)
        # Wakes the pod on this CPU as soon as it is answered (Linux 6.6); older kernels answer EINVAL and do without.
        _libc.ioctl(fd, _SET_FLAGS, _ffi.cast("void *", _SYNC_WAKE_UP))

    def has_processes(self) -> bool:
        """Tell whether a process lives behind it."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return not any(found & select.POLLHUP for _, found in poll.poll(0))

    def receive(self) -> Notification | None:
        """Take the next notification; None when its thread died or was interrupted meanwhile."""
        _own.fd = self.fd
        if self._notif.id:  # else its thread's number may be another one's, whose call another listener received
            RECEIVED.discard(self._notif.pid)
        self._slot[:] = _EMPTY
        if _libc.ioctl(self.fd, _RECV, self._notif) < 0:
            return None
        RECEIVED.add(self._notif.pid)
        return _notification(self._slot)

    def begin(self, before: int | None = None) -> None:
        """Mark the call in hand as begun: a successor must not do it twice. ``before`` is RM's figure in bytes."""
        self._mark[0] = _BEGUN if before is None else _BEGUN_AT + before

    def proceed(self, id_: int) -> bool:
        """Let the kernel perform the call with the arguments that it then has: only for calls that none makes harmful.

        Return False if the thread no longer waits, as do the other answers.
        """
        return self._send(id_, _CONTINUE)

    def answer_ok(self, id_: int) -> bool:
        """Return 0 from the call without performing it: RM's status in its argument tells the rest."""
        return self._send(id_, 0)

    def answer_error(self, id_: int, code: int) -> bool:
        """Fail the call with an errno without performing it."""
        return self._send(id_, 0, -code)

    def still_waiting(self, id_: int) -> bool:
        """Tell whether the thread is still stopped in this call. If so, memory that was read before belongs to it."""
        self._valid[0] = id_
        return bool(_libc.ioctl(self.fd, _ID_VALID, self._valid) == 0)

    def add_descriptor(self, id_: int, fd: int) -> int:
        """Give the stopped process a copy of a descriptor of ours; return its number there, -1 if that fails."""
        given = _ffi.new("struct seccomp_notif_addfd *", {"id": id_, "srcfd": fd, "newfd_flags": os.O_CLOEXEC})
        return int(_libc.ioctl(self.fd, _ADDFD, given))

    def _send(self, id_: int, flags: int, error: int = 0) -> bool:
        """Answer; False if the thread no longer waits: it was killed, or a signal made it restart the call."""
        self._answer.id, self._answer.val, self._answer.error, self._answer.flags = id_, 0, error, flags
        RECEIVED.discard(self._notif.pid)
        sent = _libc.ioctl(self.fd, _SEND, self._answer) == 0
        self._notif.id = 0  # answered: a successor need not answer it
        return bool(sent)


def is_thread_of(pid: int, tid: int) -> bool:
    """Tell whether a process has a thread of that number, even one that we may not signal."""
    return bool(_libc.tgkill(pid, tid, 0) == 0 or _ffi.errno == errno.EPERM)


class ProcessMemory:
    """Other processes' memory. Each thread of ours has an object of its own, because each has one buffer.

    Any access may wait for as long as the other process likes (userfaultfd, FUSE). A call's argument and what it points
    to often lie close together on a stack, and reading takes the same time however little is read. So a read takes the
    rest of the page too, for the next reads of the same call.
    """

    def __init__(self) -> None:
        self._buffer = _ffi.new("char[]", _MOST_READ)
        self._view = _ffi.buffer(self._buffer)
        self._local = _ffi.new("struct iovec *", {"base": self._buffer})
        self._remote = _ffi.new("struct remote_iovec *")
        #: What a write takes, and where to.
        self._out, self._back = _ffi.new("struct iovec *"), _ffi.new("struct remote_iovec[]", _MOST_AREAS)
        self._areas = list(self._back)
        #: Whose memory the buffer holds, and of which addresses.
        self._tid, self._from, self._to = 0, 0, 0

    def next_call(self) -> None:
        """Forget what was read: memory may have changed since."""
        self._to = 0

    def read(self, tid: int, address: int, size: int) -> bytes | None:
        """Read ``size`` bytes; None if a part of them is not mapped, or the process is gone."""
        data = self.read_some(tid, address, size)
        return data if len(data) == size else None

    def read_some(self, tid: int, address: int, size: int) -> bytes:
        """Read up to ``size`` bytes, as far as memory is mapped."""
        if self._from <= address and address + size <= self._to and tid == self._tid:
            at = address - self._from
            return bytes(self._view[at : at + size])
        if not 0 <= address < 1 << 64 or size > _MOST_READ:
            return b""
        self._local.len = self._remote.len = max(size, _PAGE - address % _PAGE)
        self._remote.base = address
        got = _libc.process_vm_readv(tid, self._local, 1, self._remote, 1, 0)
        self._tid, self._from, self._to = tid, address, address + got if got > 0 else 0
        return bytes(self._view[: min(got, size)]) if got > 0 else b""

    def write(self, tid: int, writes: Sequence[tuple[int, bytes | bytearray]]) -> None:
        """Write to addresses, in order. Raises OSError."""
        self._to = 0
        for at in range(0, len(writes), _MOST_AREAS):
            self._write(tid, writes[at : at + _MOST_AREAS])

    def _write(self, tid: int, writes: Sequence[tuple[int, bytes | bytearray]]) -> None:
        data = b"".join([part for _, part in writes])
        ours = _ffi.from_buffer(data)
        self._out.base, self._out.len = ours, len(data)
        for area, (address, part) in zip(self._areas, writes, strict=False):
            area.base, area.len = address, len(part)
        written = _libc.process_vm_writev(tid, self._out, 1, self._back, len(writes), 0)
        if written != len(data):
            code = _ffi.errno if written < 0 else errno.EFAULT
            raise OSError(code, os.strerror(code))
