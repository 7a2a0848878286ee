"""Seccomp user notifications: receive a stopped system call, read its process's memory, answer it.

The kernel side is linux/seccomp.h and seccomp_unotify(2). A thread stays stopped until it gets an answer, so the
listener's owner must never lose a notification. The kernel itself writes the notification to memory that outlives this
process (``slot``), before this code sees it.
"""

from __future__ import annotations

import errno
import os
import select
from dataclasses import dataclass
from typing import Any

from cffi import FFI

_ffi: Any = FFI()
_ffi.cdef(
    """
    struct seccomp_data { int nr; uint32_t arch; uint64_t ip; uint64_t args[6]; };
    struct seccomp_notif { uint64_t id; uint32_t pid, flags; struct seccomp_data data; };
    struct seccomp_notif_resp { uint64_t id; int64_t val; int32_t error; uint32_t flags; };
    struct iovec { void *base; size_t len; };
    int ioctl(int fd, unsigned long request, void *argument);
    int tgkill(int pid, int tid, int signal);
    ssize_t process_vm_readv(int pid, const struct iovec *local, unsigned long n, const struct iovec *remote,
                             unsigned long m, unsigned long flags);
    ssize_t process_vm_writev(int pid, const struct iovec *local, unsigned long n, const struct iovec *remote,
                              unsigned long m, unsigned long flags);
    """
)
_libc: Any = _ffi.dlopen(None)

_NOTIF_BYTES = int(_ffi.sizeof("struct seccomp_notif"))
#: A notification, and its call's progress.
SLOT_BYTES = _NOTIF_BYTES + 8
#: Progress of a call: begun, or begun after RM gave a figure (the mark minus _BEGUN_AT).
_BEGUN, _BEGUN_AT = 1, 2
_RECV = 0xC0502100
_SEND = 0xC0182101
_ID_VALID = 0x40082102
_SET_FLAGS = 0x40082104
_SYNC_WAKE_UP = 1
_CONTINUE = 1


@dataclass(slots=True)  # not frozen: one is made per call, and freezing takes three times as long
class Notification:
    """One stopped system call: its thread, its number on an architecture, its arguments."""

    id: int
    tid: int
    arch: int
    number: int
    arguments: tuple[int, ...]

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
    call = _notification(_ffi.cast("struct seccomp_notif *", _ffi.from_buffer(slot)))
    mark = int.from_bytes(slot[_NOTIF_BYTES:SLOT_BYTES], "little")
    return (
        UnansweredCall(call, mark >= _BEGUN, mark - _BEGUN_AT if mark >= _BEGUN_AT else None)
        if call is not None
        else None
    )


def _notification(notif: Any) -> Notification | None:
    if not notif.id:
        return None
    data = notif.data
    return Notification(notif.id, notif.pid, data.arch, data.nr, tuple(data.args))


def is_listener(fd: int) -> bool:
    """Tell whether a descriptor is a seccomp listener: another file might be readable for ever."""
    found = _libc.ioctl(fd, _ID_VALID, _ffi.new("uint64_t *")) == 0
    return bool(found or _ffi.errno == errno.ENOENT)


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
        # Wakes the pod on this CPU as soon as it is answered (Linux 6.6); older kernels say EINVAL, no matter.
        _libc.ioctl(fd, _SET_FLAGS, _ffi.cast("void *", _SYNC_WAKE_UP))

    def has_processes(self) -> bool:
        """Tell whether a process lives behind it."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return not any(found & select.POLLHUP for _, found in poll.poll(0))

    def receive(self) -> Notification | None:
        """Take the next notification; None when its thread died or was interrupted meanwhile."""
        self._slot[:] = bytes(SLOT_BYTES)
        if _libc.ioctl(self.fd, _RECV, self._notif) < 0:
            return None
        return _notification(self._notif)

    def begin(self, before: int | None = None) -> None:
        """Mark the call in hand: what it asks for is done from now on, and not to be done twice."""
        self._mark[0] = _BEGUN if before is None else _BEGUN_AT + before

    def proceed(self, id_: int) -> bool:
        """Let the kernel carry out the call as it then stands: for calls that do harm in no form they can be given."""
        return self._send(id_, _CONTINUE)

    def answer_ok(self, id_: int) -> bool:
        """Return 0 from the call without carrying it out: RM's status in its argument tells the rest."""
        return self._send(id_, 0)

    def answer_error(self, id_: int, code: int) -> bool:
        """Fail the call with an errno without carrying it out."""
        return self._send(id_, 0, -code)

    def still_waiting(self, id_: int) -> bool:
        """Tell whether the thread is still stopped in this very call, so that what was read was its own."""
        self._valid[0] = id_
        return bool(_libc.ioctl(self.fd, _ID_VALID, self._valid) == 0)

    def _send(self, id_: int, flags: int, error: int = 0) -> bool:
        """Answer; False when nobody waits any more: the thread was killed, or a signal made it begin again."""
        self._answer.id, self._answer.val, self._answer.error, self._answer.flags = id_, 0, error, flags
        sent = _libc.ioctl(self.fd, _SEND, self._answer) == 0
        self._notif.id = 0  # answered: no successor of ours has to
        return bool(sent)


def is_thread_of(pid: int, tid: int) -> bool:
    """Tell whether a process has a thread of that number, which we may not be allowed to signal."""
    return bool(_libc.tgkill(pid, tid, 0) == 0 or _ffi.errno == errno.EPERM)


class ProcessMemory:
    """Other processes' memory. One for each thread of ours that reads: what it reads into is its own.

    Any access may wait for as long as the other process likes (userfaultfd, FUSE).
    """

    def __init__(self, size: int = 1 << 16) -> None:
        self._size = size
        self._buffer = _ffi.new("char[]", size)
        self._view = _ffi.buffer(self._buffer)
        self._local = _ffi.new("struct iovec *", {"base": self._buffer})
        self._remote = _ffi.new("struct iovec *")

    def read(self, tid: int, address: int, size: int) -> bytes | None:
        """Read memory; None when any of it is not there or the process is gone."""
        data = self.read_some(tid, address, size)
        return data if len(data) == size else None

    def read_some(self, tid: int, address: int, size: int) -> bytes:
        """Read as much as is there of what is asked for."""
        if not 0 <= address < 1 << 64 or size > self._size:
            return b""
        self._local.len = self._remote.len = size
        self._remote.base = _ffi.cast("void *", address)
        got = _libc.process_vm_readv(tid, self._local, 1, self._remote, 1, 0)
        return bytes(self._view[:got]) if got > 0 else b""

    def write(self, tid: int, address: int, data: bytes | bytearray) -> None:
        """Write memory. Raises OSError."""
        local = _ffi.new("struct iovec *", {"base": _ffi.from_buffer(data), "len": len(data)})
        remote = _ffi.new("struct iovec *", {"base": _ffi.cast("void *", address), "len": len(data)})
        if _libc.process_vm_writev(tid, local, 1, remote, 1, 0) != len(data):
            code = _ffi.errno or errno.EFAULT
            raise OSError(code, os.strerror(code))
