"""Finds a control file that a pod has moved: its client lives, and no descriptor that is known leads to it.

A timeslice is set through the file of the TSG's client. A process can have a million descriptors, so a thread for each
pod looks through them, slowly. Until it finds the file, the client is lost: ``enforce.py`` keeps its TSGs off the card.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Set
from contextlib import closing, suppress
from dataclasses import dataclass, field

import structlog

from qgpu.errors import NotSupportedError
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.linux import cgroup, fd_budget

_log = structlog.get_logger("guardian")

#: After this many descriptors a search rests, so that it takes little of a processor.
_AT_ONCE, _REST_S = 64, 0.01
#: A client that is not found within this time is lost; the search goes on.
_PATIENCE_S = 1.0
#: Clients that were not found are searched for again after this long.
_AGAIN_S = 5.0


@dataclass(slots=True)
class MovedFileSearch:
    """All searches."""

    table: ObjectTable
    #: Names those of some clients that a descriptor of a process leads to. Raises OSError where we could not look.
    reaches: Callable[[int, int, Set[int]], Set[int]]
    exists: Callable[[int], bool]
    #: Takes note of a descriptor that leads to a client (client, process, descriptor); False where it can't be used.
    found: Callable[[int, int, int], bool]
    #: Told that who is lost has changed.
    changed: Callable[[], None]
    #: Clients that RM has and that could not be reached.
    lost: set[int] = field(default_factory=set)
    #: By pod, the clients to search for.
    _wanted: dict[str, set[int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def want(self, client: int) -> None:
        """Search for a client's file, unless somebody does already."""
        entry = self.table.clients.get(client)
        if entry is None:
            return
        with self._lock:
            if (wanted := self._wanted.get(entry.pod)) is not None:
                wanted.add(client)
                return
            self._wanted[entry.pod] = {client}
        try:
            threading.Thread(target=self._work, args=(entry.pod,), name="qgpu-search", daemon=True).start()
        except RuntimeError:  # no thread is to be had: the next plan asks again
            self._wanted.pop(entry.pod, None)

    def _work(self, pod: str) -> None:
        """Search for a pod's clients until none is wanted."""
        try:
            while clients := self._still_wanted(pod):
                if not self._search(pod, clients):
                    time.sleep(_AGAIN_S)
        except BaseException:  # else another search for the pod may have begun already
            with self._lock:
                self.lost -= self._wanted.pop(pod, set())
            raise

    def _still_wanted(self, pod: str) -> set[int]:
        """Return what is searched for; clients that are gone, or another pod's by now, are not any more."""
        with self._lock:
            wanted = self._wanted[pod]
            gone = {client for client in wanted if not self._is_pods(pod, client)}
            wanted -= gone
            self.lost -= gone
            if not wanted:
                del self._wanted[pod]
            return set(wanted)

    def _is_pods(self, pod: str, client: int) -> bool:
        entry = self.table.clients.get(client)
        return entry is not None and entry.pod == pod and self.exists(client)

    def _search(self, pod: str, clients: set[int]) -> bool:
        """Go once through a pod's descriptors; False when some client was not found."""
        left, until = set(clients), time.monotonic() + _PATIENCE_S
        try:
            with closing(self._descriptors(pod)) as descriptors:
                for count, (pid, fd) in enumerate(descriptors):
                    for client in sorted(self.reaches(pid, fd, left)) if left else ():
                        left -= self._find(pod, client, pid, fd)
                    if not left:
                        return True
                    if count % _AT_ONCE == _AT_ONCE - 1:
                        time.sleep(_REST_S)
                    if time.monotonic() > until:
                        self._lose(pod, left)
        except OSError as error:  # we could not look, which tells nothing
            _log.warning("no descriptor is left: a file is searched for again", pod=pod, reason=str(error))
            return False
        self._lose(pod, left)
        return False

    def _find(self, pod: str, client: int, pid: int, fd: int) -> set[int]:
        """Settle a client whose file is there; return it, or nothing where the file can't be used."""
        if not self.found(client, pid, fd):
            return set()
        with self._lock:
            self._wanted[pod].discard(client)
            self.lost.discard(client)
        self.changed()
        return {client}

    def _lose(self, pod: str, clients: Set[int]) -> None:
        new = {client for client in clients - self.lost if self._is_pods(pod, client)}
        for client in sorted(new):
            _log.warning("control file not found: its client is kept off the card", pod=pod, client=client)
        if new:
            self.lost |= new
            self.changed()

    def _descriptors(self, pod: str) -> Generator[tuple[int, int]]:
        """Yield (process, descriptor) of all that a pod's processes have open."""
        entry = self.table.pods.get(pod)
        inside: tuple[int, ...] = ()
        with suppress(NotSupportedError):
            inside = cgroup.pids(entry.cgroup) if entry is not None else ()
        for pid in dict.fromkeys((*self.table.pids_of(pod), *inside)):
            try:
                with os.scandir(f"/proc/{pid}/fd") as entries:
                    yield from ((pid, int(each.name)) for each in entries)
            except OSError as error:
                if error.errno in fd_budget.NONE_LEFT:
                    raise
