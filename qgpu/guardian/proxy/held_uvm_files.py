"""Open files of /dev/nvidia-uvm with registered cards, of processes under a limit: held so that they can be emptied.

Memory that UVM has mapped stays on the card until its file is released, even after the process has ended
(uvm_va_space_mm_shutdown frees no external range). A child process or a message in flight may hold that file for as
long as it likes. So when a process ends or closes the file, the guardian unregisters the file's cards. That removes all
UVM mappings and memory from these cards, and after the process's end no card can be registered on the file again.

A second file of UVM's keeps the memory map in which one was initialised (UVM_MM_INITIALIZE), with all managed memory,
also when its process has executed another program: /proc/PID/maps then shows the new map. So maps is opened as a file
is initialised, because the kernel goes on showing the map of that moment there.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from qgpu.guardian.accounting import managed_memory
from qgpu.guardian.accounting.sets_by_key import Counts
from qgpu.guardian.proxy.ioctl_proxy import Perform
from qgpu.linux import fd_budget, kcmp, proc
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
    #: /proc/PID/maps of the map in which the process initialised it, and the last charge for that; None: somebody else.
    maps: int | None = None
    _mapped: int = 0
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def mapped(self) -> int | None:
        """Return the charge for the map in which it was initialised; None if it is unknown.

        Where the thread has ended by which the kernel shows that map, it is the most that its process has had since.
        """
        with self._reading:
            if self.maps is None:
                return 0
            try:
                with open(os.dup(self.maps), "rb") as lines:
                    lines.seek(0)
                    self._mapped = managed_memory.cost(managed_memory.areas(lines))
            except ProcessLookupError:
                if (now := managed_memory.mapped(self.pid)) is None:
                    return None
                self._mapped = max(self._mapped, now)
            return self._mapped

    def close(self) -> None:
        """Close our descriptors."""
        os.close(self.ours)
        with self._reading:
            if self.maps is not None:
                os.close(self.maps)
            self.maps = None


@dataclass(slots=True)
class UvmFiles:
    """All such files, by process."""

    perform: Perform
    _files: dict[int, list[UvmFile]] = field(default_factory=dict)
    #: Those that a process has initialised and on which it has used no card so far, by process.
    _new: dict[int, list[UvmFile]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    #: How many files with cards are held or not released yet, by pod, and how many files in all.
    _counts: Counts[str] = field(default_factory=Counts)
    _open_of: Counts[str] = field(default_factory=Counts)

    def initialise(self, pod: str, pid: int, tid: int, fd: int, file: int, beside: int = 0) -> int | None:
        """Hold a file that a thread is about to initialise; return the process's descriptor that is known of it.

        None if the process or the pod has too many.
        """
        with self._lock:
            new = list(self._new.get(pid, ()))
        closed, maps = [each for each in new if not _has(pid, each)], _maps_of(pid, tid)  # this may take long
        with self._lock:
            for each in closed:
                self._take_new(pid, each)
            known = [*self._held([pid]), *self._new.get(pid, ())]
            found = next((each.theirs for each in known if _is(each, file)), None)
            may = found is None and maps is not None and len(known) < MOST
            if may and (made := self._open(pod, pid, fd, file, beside)) is not None:
                made.maps, maps, found = maps, None, fd
                self._new.setdefault(pid, []).append(made)
        if maps is not None:
            os.close(maps)
        for each in closed:
            self._close(each)
        return found

    def was_initialised(self, pid: int, file: int) -> bool:
        """Tell whether a file was initialised by a process, so that it is known in which memory map."""
        with self._lock:
            return any(each.maps is not None and _is(each, file) for each in self._of(pid))

    def mapped(self, pid: int) -> int | None:
        """Return the charge for what a process maps, also in memory maps that it has left; None if it is unknown.

        UVM manages memory only in maps in which a file of it was initialised.
        """
        with self._lock:
            files = [each for each in self._of(pid) if each.maps is not None]
        if not files:
            return managed_memory.mapped(pid)
        found = [each.mapped() for each in files]
        return None if None in found else sum(filter(None, found))

    def _of(self, pid: int) -> list[UvmFile]:
        return [*self._files.get(pid, ()), *self._new.get(pid, ())]

    def _open(self, pod: str, pid: int, fd: int, file: int, beside: int) -> UvmFile | None:
        """Hold a file, if the pod may have another one: it takes two descriptors."""
        if not fd_budget.within_fair_share(self._open_of[pod], fd_budget.headroom(2 * self._open_of.total() + beside)):
            return None
        try:
            made = UvmFile(pod, pid, fd_budget.check_headroom(os.dup(file)), fd)
        except OSError:
            return None
        self._open_of.change(pod, 1)
        return made

    def _take_new(self, pid: int, file: UvmFile) -> None:
        """Forget that a process has used no card on a file."""
        if file in (new := self._new.get(pid, [])):
            new.remove(file)
            if not new:
                del self._new[pid]

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
            made = next((each for each in self._new.get(pid, ()) if _is(each, file)), None)
            if len(held) >= MOST or (made is None and (made := self._open(pod, pid, fd, file, beside)) is None):
                return None
            self._take_new(pid, made)
            made.cards.update(cards)
            self._files.setdefault(pid, []).append(made)
            self._counts[pod] += 1
            return made.theirs

    def show_again(self, pid: int, file: int) -> None:
        """Take a file that a dead guardian held for one that the process initialised in its memory map of now."""
        with self._lock:
            for each in self._held([pid]):
                if each.maps is None and _is(each, file):
                    each.maps = _maps_of(pid, pid)

    def take(self, pid: int) -> list[UvmFile]:
        """Remove and return the files of a process that has ended."""
        with self._lock:
            taken = [*self._held([pid]), *self._new.pop(pid, ())]
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
            return any(each.theirs == fd for each in self._of(pid))

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
                if each in (held := self._files.get(each.pid, [])):
                    held.remove(each)
                    self._counts.change(each.pod, -1)
                    if not held:
                        del self._files[each.pid]
            self._close(each)

    def _close(self, file: UvmFile) -> None:
        file.close()
        with self._lock:
            self._open_of.change(file.pod, -1)


def _maps_of(pid: int, tid: int) -> int | None:
    """Open the maps of a process's memory: of the thread, where the first one has ended; None if that is impossible."""
    try:
        return os.open(f"/proc/{pid}/{f'task/{tid}/' * proc.is_headless(pid)}maps", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


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
