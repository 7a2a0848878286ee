"""Files of /dev/nvidia-uvm on which processes under a limit have registered cards, held so that they can be emptied.

What UVM has mapped stays on the card until its file is released, also when the process whose address space it was has
ended (uvm_va_space_mm_shutdown frees no external range), and a child or a message in flight may hold that file for as
long as it likes. So when a process has ended, or has the file no longer, its cards are unregistered on it: that takes
every mapping and all memory of UVM's from them, and after the process's end no card can be registered on it again.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from qgpu.guardian.proxy.ioctl_proxy import Perform
from qgpu.linux import fd_budget, kcmp
from qgpu.nvidia import uvm
from qgpu.nvidia.abi import ffi

#: How many of them a process may have; CUDA opens one.
MOST = 8


@dataclass(slots=True, eq=False)
class UvmFile:
    """One such file: our descriptor, the process's own, and the cards it has registered."""

    ours: int
    theirs: int
    cards: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class UvmFiles:
    """All of them, by process."""

    perform: Perform
    _files: dict[int, list[UvmFile]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _total: int = 0

    def keep(self, pid: int, fd: int, file: int, cards: Iterable[bytes]) -> bool:
        """Hold a file on which cards are about to be registered; False when the process has too many."""
        with self._lock:
            held = self._files.setdefault(pid, [])
            for each in held:
                if kcmp.same_file(os.getpid(), each.ours, os.getpid(), file):
                    each.cards.update(cards)
                    return True
            if len(held) >= MOST:
                return False
            try:
                held.append(UvmFile(fd_budget.long_held(os.dup(file)), fd, set(cards)))
                self._total += 1
            except OSError:
                return False
            return True

    def take(self, pid: int) -> list[UvmFile]:
        """Return a process's files, which it has ended with."""
        with self._lock:
            taken = self._files.pop(pid, [])
            self._total -= len(taken)
            return taken

    def take_closed(self, pids: Collection[int] | None = None) -> dict[int, list[UvmFile]]:
        """Return, by process, the files that it has closed, as when it became another program; of some, or of all.

        That may take long: a process can have a million descriptors. Nobody else waits meanwhile.
        """
        with self._lock:
            looked = self._files if pids is None else pids
            held = [(pid, each) for pid in looked for each in self._files.get(pid, ())]
        gone = [(pid, each) for pid, each in held if not _has(pid, each)]
        closed: dict[int, list[UvmFile]] = {}
        with self._lock:
            for pid, each in gone:
                if each in self._files.get(pid, ()):  # nobody else has taken it
                    self._files[pid].remove(each)
                    self._total -= 1
                    closed.setdefault(pid, []).append(each)
        return closed

    @property
    def total(self) -> int:
        """Return how many files are held."""
        return self._total

    def count(self, pid: int) -> int:
        """Return how many files are held of a process."""
        return len(self._files.get(pid, ()))

    def processes(self) -> list[int]:
        """List the processes of which files are held."""
        with self._lock:
            return [pid for pid, held in self._files.items() if held]

    def none_of(self, pid: int) -> bool:
        """Tell whether no file of a process's is held."""
        with self._lock:
            return not self._files.get(pid)

    def release(self, files: Iterable[UvmFile]) -> None:
        """Take everything on cards from files, and let go of them. May take as long as freeing memory does."""
        for each in files:
            for card in each.cards:
                argument = ffi.from_buffer(bytearray(struct.pack("<16sI", card, 0)))
                self.perform(each.ours, uvm.UNREGISTER_GPU, argument)
            os.close(each.ours)


def _has(pid: int, held: UvmFile) -> bool:
    """Tell whether a process has a file, first where it was; one that is gone is for its end to tell."""
    if kcmp.same_file(os.getpid(), held.ours, pid, held.theirs):
        return True
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return True
    return any(kcmp.same_file(os.getpid(), held.ours, pid, int(name)) for name in names)
