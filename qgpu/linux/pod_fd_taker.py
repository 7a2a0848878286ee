"""Takes and compares files of pods' processes, in one thread per pod: a pod can make that as slow as it likes.

pidfd_getfd(2) and kcmp(2) wait while the process executes a program: until its old memory is freed, which takes a
quarter of a second per GiB, and until files that close on exec are flushed, for which FUSE asks the pod.
"""

from __future__ import annotations

import errno
import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from qgpu.linux import kcmp

#: How long the kernel may wait for the pod. After that, no other file of the pod is taken before this one has come.
_PATIENCE_S = 0.005
#: How long a file may take in all: on a busy host the thread that takes it waits for a CPU.
_LONGEST_S = 1.0
#: Whoever asks waits for a pod's slow files at most 1/_PARTS of the time in the long run, and about _AHEAD_S / _PARTS
#: in a row.
_PARTS, _AHEAD_S = 20, 0.4
#: A pod's thread ends after this long without work.
_IDLE_S = 1.0
#: The numbers of pidfd_getfd, kcmp and statx (asm/unistd.h), and how many looks in a row must find the thread there.
_CALLS, _LOOKS = {"438", *({"272", "291"} if platform.machine() == "aarch64" else {"312", "332"})}, 3

#: Takes a descriptor of a process, given its pidfd. Raises OSError.
Take = Callable[[int, int], int]


@dataclass(slots=True, eq=False)
class _Request:
    #: Returns what is asked for, a descriptor of ours if it ``takes`` one. Raises OSError.
    act: Callable[[], int]
    takes: bool
    found: int = -1
    error: OSError | None = None
    done: bool = False
    given_up: bool = False


@dataclass(slots=True, eq=False)
class _PodTaker:
    """One pod's thread; it has one request at a time."""

    request: _Request | None = None
    served: bool = False
    #: The thread's number.
    tid: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    #: Until when the pod rests for the time that its slow files have cost.
    due_s: float = 0.0

    def do(self, request: _Request) -> int:
        began_s = time.monotonic()
        with self.changed:
            self.changed.wait_for(lambda: self.request is None or self.request.given_up, _LONGEST_S)
            if self.request is not None or self.due_s - began_s > _AHEAD_S:
                raise OSError(errno.EBUSY, "files of the pod are taken too slowly")
            self.request = request
            self._ensure_served()
            self.changed.notify_all()
            looks = 0
            while not (done := self.changed.wait_for(lambda: request.done, _PATIENCE_S / _LOOKS)):
                looks = looks + 1 if self._waits_for_pod() else 0
                if looks >= _LOOKS or time.monotonic() - began_s > _LONGEST_S:
                    break
            if not done:
                request.given_up = True
                self.due_s = max(self.due_s, began_s) + _PARTS * (time.monotonic() - began_s)
                raise OSError(errno.EBUSY, "a file of the pod is taken too slowly")
        if request.error is not None:
            raise request.error
        return request.found

    def _waits_for_pod(self) -> bool:
        """Tell whether the thread waits in the kernel for the file, and not for a CPU or for Python's lock."""
        with suppress(OSError):
            return Path(f"/proc/self/task/{self.tid}/syscall").read_text().split()[0] in _CALLS
        return False

    def _ensure_served(self) -> None:
        if self.served:
            return
        try:
            threading.Thread(target=self._work, name="qgpu-take", daemon=True).start()
        except RuntimeError as error:  # no thread is available
            self.request = None
            raise OSError(errno.EBUSY, str(error)) from error
        self.served = True

    def _work(self) -> None:
        """Take files until none was wanted for a while."""
        self.tid = threading.get_native_id()
        while True:
            with self.changed:
                if not self.changed.wait_for(lambda: self.request is not None, _IDLE_S):
                    self.served = False
                    return
                request = self.request
            assert request is not None
            try:
                request.found = request.act()
            except OSError as error:
                request.error = error
            with self.changed:
                request.done, self.request = True, None
                self.changed.notify_all()
            if request.given_up and request.takes and request.found >= 0:
                with suppress(OSError):
                    os.close(request.found)


@dataclass(slots=True)
class PodFdTaker:
    """All pods' threads that take files."""

    take_fd: Take
    _takers: dict[str, _PodTaker] = field(default_factory=dict)

    def take(self, pod: str, pidfd: int, fd: int, take: Take | None = None) -> int:
        """Take a descriptor of a process of a pod, given its pidfd, by ``take`` if that is given.

        Raises OSError: EBUSY if that takes too long, or took too long lately.
        """
        act = take or self.take_fd
        return self._of(pod).do(_Request(lambda: act(pidfd, fd), takes=True))

    def is_same(self, pod: str, file: int, pid: int, fd: int) -> bool:
        """Tell whether a descriptor of a process of a pod means the same file as one of ours. Raises as ``take``."""
        same = partial(kcmp.same_file, os.getpid(), file, pid, fd)
        return bool(self._of(pod).do(_Request(same, takes=False)))

    def _of(self, pod: str) -> _PodTaker:
        return self._takers.setdefault(pod, _PodTaker())

    def forget(self, pod: str) -> None:
        """Forget a retired pod."""
        self._takers.pop(pod, None)
