"""An RM that outlives guardians, as the driver does, and guardians that die at a line of their own code."""

from __future__ import annotations

import errno
import functools
import gc
import os
import pickle
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable

from qgpu import guardian, linux
from qgpu.guardian.failover.journal import Journal
from qgpu.nvidia import abi, uvm
from tests.fuzz.judged import CountingRm
from tests.guardian.pod import PATIENCE_S, Files, Pod

_INVALID_DEVICE = 0x21
REGISTER_VIDMEM, UNREGISTER_VIDMEM = 0x503C0104, 0x503C0105
_KEPT = (
    "objects",
    "sizes",
    "aliases",
    "mapped",
    "memory",
    "blocks",
    "exported",
    "tied",
    "cards",
    "files",
    "peers",
    "_count",
)
_GUARDIANS = (os.path.dirname(guardian.__file__), os.path.dirname(linux.__file__))


def _lasts(method: Callable) -> Callable:
    """Let a call to RM happen whole or not at all, on what all guardians share."""

    @functools.wraps(method)
    def through(self, *arguments):
        with self.lock:
            self.load()
            try:
                return method(self, *arguments)
            finally:
                self.keep()

    return through


class LastingRm(CountingRm):
    """It refuses, as RM does, what can be done once only: a card's or a file's registration, a descriptor's export."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.cards, self.files = False, False, False
        self.peers: set = set()
        self.lock = threading.RLock()
        self.fd = os.memfd_create("rm")
        self.keep()

    def load(self) -> None:
        self.__dict__.update(pickle.loads(os.pread(self.fd, os.fstat(self.fd).st_size, 0)))

    def said(self) -> bytes:
        return pickle.dumps({name: getattr(self, name) for name in _KEPT})

    def keep(self) -> None:
        state = self.said()
        os.pwrite(self.fd, state, 0)
        os.ftruncate(self.fd, len(state))

    def perform(self, fd, request, argument):
        if request & 0xFF == abi.NV_ESC_REGISTER_FD and request not in uvm.WATCHED:
            again, self.files = self.files, True
            return errno.EINVAL if again else 0
        return super().perform(fd, request, argument)

    def private_bytes(self, instance, pid):
        """Memory behind one handle, and no descriptor or mapping."""
        alone = [block for block in self.memory.values() if list(self.memory.values()).count(block) == 1]
        return sum(self.blocks[block] for block in alone if block not in (*self.exported, *self.mapped))

    def duplicate(self, file, rm, handle):
        if (rm.client, handle) in self.objects:
            return False
        self.memory[rm.client, handle] = self.memory[rm.key]
        return super().duplicate(file, rm, handle)

    def _control(self, data):
        command = int.from_bytes(data[8:12], "little")
        if command == abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD:
            again, self.tied = self.tied, True
            if again:
                self._status(data, 28, abi.NV_ERR_STATE_IN_USE)
                return 0
        if command in (REGISTER_VIDMEM, UNREGISTER_VIDMEM):
            return self._peer(data, command)
        return super()._control(data)

    def _peer(self, data, command):
        """Let memory be known to peers, or no longer (third_party_p2p.c)."""
        client, *_, params, size, _ = struct.unpack("<IIIIQII", data)
        memory = client, int.from_bytes(self._params(params, size)[:4], "little")
        status = abi.NV_OK
        if command == REGISTER_VIDMEM:
            status = abi.NV_ERR_INSERT_DUPLICATE_NAME if memory in self.peers else abi.NV_OK
            self.peers |= {memory}
        elif memory not in self.peers:
            status = abi.NV_ERR_OBJECT_NOT_FOUND
        else:
            self.peers -= {memory}
        self._status(data, 28, status)
        return 0

    def _uvm(self, request, data):
        if request == uvm.UNREGISTER_GPU:
            self.cards = False
            return 0
        result = super()._uvm(request, data)
        if request == uvm.REGISTER_GPU:
            again, self.cards = self.cards, True
            if again:
                self._status(data, uvm.layouts("580.1")[request].status_at, _INVALID_DEVICE)
        return result

    def state(self):
        """Return all that RM has; memory by who shares it."""
        self.exists((7, 7))  # as RM is now
        alike = {
            key: sorted(other for other in self.memory if self.memory[other] == self.memory[key]) for key in self.memory
        }
        kept_by_descriptor = sorted(key for key in self.memory if self.memory[key] in self.exported)
        once = self.tied, self.cards, self.files, self.peers
        return self.objects, alike, kept_by_descriptor, len(self.exported), once, self.held


for _name in (
    "exists",
    "object_info",
    "find_object",
    "size",
    "size_by_file",
    "free",
    "free_anywhere",
    "duplicate",
    "is_same",
):
    setattr(LastingRm, _name, _lasts(getattr(LastingRm, _name)))
for _name in ("private_bytes", "perform"):
    setattr(LastingRm, _name, _lasts(getattr(LastingRm, _name)))


class MortalPod(Pod):
    """A pod whose guardians die: each next one knows what stands in the journal."""

    _lives = 0

    def begin_anew(self) -> None:
        """Forget all, RM too, but for the process and its filter."""
        self._close()
        os.close(self.shared.journal.fd)
        if hasattr(self.rm, "fd"):
            os.close(self.rm.fd)
        self.rm = LastingRm()
        os.close(self.files.fd)
        self.files = Files()
        self._lives += 1
        if self._lives % 25 == 0:
            gc.collect()  # journals that are mapped
        self.shared = self.fresh(Journal())
        self.shared.note({"fact": "pod", "name": "web", "grants": {}})
        self.shared.listeners.add("web", self.listener, self.number)
        self.dispatcher = self.dispatcher_of(self.shared, self.number)

    def succeed(self) -> None:
        """Become the next guardian, up to what the last one had in hand."""
        self._close()
        fd = self.shared.journal.fd
        settings = self.shared.major, self.shared.uvm_major
        self.shared = self.fresh(Journal(fd))
        self.shared.major, self.shared.uvm_major = settings
        for fact in self.shared.journal.read()[1]:
            self.shared.table.note(fact)
        self.shared.listeners.add("web", self.listener, self.number)
        self.shared.resume()
        self.dispatcher = self.dispatcher_of(self.shared, self.number)

    def _serve_once(self) -> None:
        """Serve a call, unless it has its answer."""
        listener = self.shared.listeners[self.number][1]
        ready, _, _ = select.select([self.child.sock, self.listener], [], [], PATIENCE_S)
        if self.child.sock not in ready and (call := listener.receive()) is not None:
            self.dispatcher.serve(listener, call)

    def _close(self) -> None:
        """Close what a guardian has open, as its death does."""
        for pid in list(self.rm.pidfds):
            for file in self.shared.uvm_files.take(pid):
                os.close(file.ours)
            self.rm.unwatch(pid)

    def resume(self) -> None:
        """Settle what the last one had in hand."""
        self.dispatcher.resume(
            self.shared.listeners[self.number][1], self.shared.listeners.unanswered_call(self.number)
        )

    def guardian_that_dies(self, line: int) -> int:
        """Let another process be the next guardian, and die at a line of its code, from the first call on.

        Return how it ended: SIGKILL, or 0 when it had given an answer before.
        """
        pid = os.fork()
        if pid == 0:
            try:
                self.succeed()
                unanswered = self.shared.listeners.unanswered_call(self.number) is not None
                if not unanswered:
                    self.resume()  # as before the first call
                with _death_at(line):
                    if unanswered:
                        self.resume()
                    else:
                        self._serve_once()
            finally:
                os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class _death_at:  # noqa: N801 - a context manager
    def __init__(self, line: int) -> None:
        self.left = line

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(_GUARDIANS):
            return None
        if event == "line":
            self.left -= 1
            if self.left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._trace
