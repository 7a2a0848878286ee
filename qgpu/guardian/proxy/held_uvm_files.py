"""Open files of /dev/nvidia-uvm with registered cards, of processes under a limit: held so that they can be emptied.

Memory that UVM has mapped stays on the card until its file is released, even after the process has ended
(uvm_va_space_mm_shutdown frees no external range). A child process or a message in flight may hold that file for as
long as it likes. So when a process ends or closes the file, the guardian unregisters the file's cards. That removes all
UVM mappings and memory from these cards, and after the process's end no card can be registered on the file again.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from qgpu.guardian.accounting.sets_by_key import Counts
from qgpu.guardian.proxy.ioctl_proxy import Perform
from qgpu.linux import fd_budget, kcmp
from qgpu.nvidia import uvm
from qgpu.nvidia.abi import ffi

#: How many such files a process may have; CUDA opens one.
MOST = 8


@dataclass(slots=True, eq=False)
class UvmFile:
    """One such file: its pod and process, our descriptor, the process's own one, and the cards registered on it."""

    pod: str
    pid: int
    ours: int
    theirs: int
    cards: set[bytes] = field(default_factory=set)
    #: Whether it was taken and is not released yet: its cards are still registered.
    leaving: bool = False


@dataclass(slots=True)
class UvmFiles:
    """All such files, by process."""

    perform: Perform
    _files: dict[int, list[UvmFile]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    #: How many files are held or not released yet, by pod.
    _counts: Counts[str] = field(default_factory=Counts)

    def hold(self, pod: str, pid: int, fd: int, file: int, cards: Iterable[bytes], beside: int = 0) -> int | None:
        """Hold a file on which cards are about to be used; return the process's descriptor that is known of it.

        None if the process or the pod has too many; ``beside`` the files, so many descriptors are held. A process can
        name one file by any number of descriptors.
        """
        with self._lock:
            held = self._held([pid])
            for each in held:
                if _is(each, file):
                    each.cards.update(cards)
                    return each.theirs
            room = fd_budget.headroom(self._counts.total() + beside)
            if len(held) >= MOST or not fd_budget.within_fair_share(self._counts[pod], room):
                return None
            try:
                ours = fd_budget.check_headroom(os.dup(file))
            except OSError:
                return None
            self._files.setdefault(pid, []).append(UvmFile(pod, pid, ours, fd, set(cards)))
            self._counts[pod] += 1
            return fd

    def take(self, pid: int) -> list[UvmFile]:
        """Remove and return the files of a process that has ended."""
        with self._lock:
            taken = self._held([pid])
            for each in taken:
                each.leaving = True
            return taken

    def take_closed(self, pids: Collection[int]) -> dict[int, list[UvmFile]]:
        """Remove and return, by process, files that some processes have closed, for example by exec.

        This may take long, because a process can have a million descriptors. The lock is free meanwhile.
        """
        with self._lock:
            held = self._held(pids)
        gone = [each for each in held if not _has(each.pid, each)]
        closed: dict[int, list[UvmFile]] = {}
        with self._lock:
            for each in gone:
                if not each.leaving:  # no other thread has taken it
                    each.leaving = True
                    closed.setdefault(each.pid, []).append(each)
        return closed

    def count(self, pod: str) -> int:
        """Return how many files of a pod are held or not released yet."""
        return self._counts[pod]

    def has_only_of(self, pod: str, pid: int) -> bool:
        """Tell whether no other process of a pod has a file here."""
        with self._lock:
            return self._counts[pod] == len(self._files.get(pid, ()))

    def pods(self) -> list[str]:
        """List the pods that have files here."""
        with self._lock:
            return list(self._counts)

    def has_none(self, pid: int) -> bool:
        """Tell whether no file of a process is held, and all that were are released."""
        with self._lock:
            return pid not in self._files

    def has_only(self, pid: int, file: int) -> bool:
        """Tell whether a file is held of a process, and no other one; so all that UVM maps for it is in this file."""
        with self._lock:
            found = self._files.get(pid, ())
            return len(found) == 1 and _is(found[0], file)

    def has_at(self, pid: int, fd: int) -> bool:
        """Tell whether a file of a process is held, or not released yet, that is known by this descriptor of it."""
        with self._lock:
            return any(each.theirs == fd for each in self._files.get(pid, ()))

    def copies(self, pids: Iterable[int]) -> Iterator[int]:
        """Yield a descriptor of each file of some processes, one at a time. Raises OSError if none is free."""
        with self._lock:
            held = self._held(pids)
        for each in held:
            with self._lock:
                if each.leaving:
                    continue  # another thread empties it
                copy = os.dup(each.ours)
            try:
                yield copy
            finally:
                os.close(copy)

    def _held(self, pids: Iterable[int]) -> list[UvmFile]:
        return [each for pid in pids for each in self._files.get(pid, ()) if not each.leaving]

    def release(self, files: Iterable[UvmFile]) -> None:
        """Unregister the cards on files, and close them. May take as long as freeing the memory."""
        for each in files:
            for card in each.cards:
                argument = ffi.from_buffer(bytearray(struct.pack("<16sI", card, 0)))
                self.perform(each.ours, uvm.UNREGISTER_GPU, argument)
            with self._lock:
                self._files[each.pid].remove(each)
                if not self._files[each.pid]:
                    del self._files[each.pid]
                self._counts.change(each.pod, -1)
            os.close(each.ours)


def _is(held: UvmFile, file: int) -> bool:
    return kcmp.same_file(os.getpid(), held.ours, os.getpid(), file)


def _has(pid: int, held: UvmFile) -> bool:
    """Tell whether a process has a file open, first at its old descriptor; True if the process cannot be read."""
    if kcmp.same_file(os.getpid(), held.ours, pid, held.theirs):
        return True
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return True
    return any(kcmp.same_file(os.getpid(), held.ours, pid, int(name)) for name in names)
