"""Finds a control file that a pod has moved: its client exists, but no known descriptor leads to it.

RM sets a timeslice only through the file of the TSG's client. A process can have a million descriptors, so one thread
per pod searches them slowly. Until it finds the file the client is lost, and ``enforcer.py`` keeps its TSGs off the
card.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Set
from contextlib import closing
from dataclasses import dataclass, field

import structlog

from qgpu.errors import NotSupportedError
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.linux import cgroup, fd_budget

_log = structlog.get_logger("guardian")

#: A search rests after this many descriptors, so that it takes little CPU time.
_AT_ONCE, _REST_S = 64, 0.01
#: A client that is not found within this time counts as lost; the search goes on.
_PATIENCE_S = 1.0
#: After this long, clients that were not found are searched for again.
_AGAIN_S = 5.0


@dataclass(slots=True)
class ControlFileSearch:
    """All searches, one per pod."""

    table: ObjectTable
    #: Returns which of some clients a descriptor of a process leads to. Raises OSError if it cannot be examined.
    clients_behind_fd: Callable[[int, int, Set[int]], Set[int]]
    exists: Callable[[int], bool]
    #: Records a descriptor that leads to a client (client, process, descriptor); False if it cannot be used.
    found: Callable[[int, int, int], bool]
    #: Called when the set of lost clients has changed.
    changed: Callable[[], None]
    #: Clients that RM has and that no descriptor was found for.
    lost: set[int] = field(default_factory=set)
    #: By pod, the clients to search for.
    _wanted: dict[str, set[int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def search_for(self, client: int) -> None:
        """Search for a client's file, unless a search for it is running."""
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
        except RuntimeError:  # no thread is available: the next plan asks again
            self._wanted.pop(entry.pod, None)

    def _work(self, pod: str) -> None:
        try:
            while clients := self._still_wanted(pod):
                if not self._search(pod, clients):
                    time.sleep(_AGAIN_S)
        except BaseException:  # a new search for the pod may have begun otherwise
            with self._lock:
                self.lost -= self._wanted.pop(pod, set())
            raise

    def _still_wanted(self, pod: str) -> set[int]:
        """Return the clients to search for, without those that are gone or belong to another pod now."""
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
        """Search a pod's descriptors once; False if a client was not found."""
        left, until = set(clients), time.monotonic() + _PATIENCE_S
        try:
            with closing(self._descriptors(pod)) as descriptors:
                for count, (pid, fd) in enumerate(descriptors):
                    for client in sorted(self.clients_behind_fd(pid, fd, left)) if left else ():
                        left -= self._find(pod, client, pid, fd)
                    if not left:
                        return True
                    if count % _AT_ONCE == _AT_ONCE - 1:
                        time.sleep(_REST_S)
                    if time.monotonic() > until:
                        self._lose(pod, left)
        except OSError as error:
            if error.errno in fd_budget.OUT_OF_FDS:  # the search could not look everywhere, so nothing follows from it
                _log.warning("no free descriptor: file search repeated", pod=pod, reason=str(error))
                return False
            _log.warning("file search failed and is repeated", pod=pod, reason=str(error))
            time.sleep(max(0.0, until - time.monotonic()))
        self._lose(pod, left)
        return False

    def _find(self, pod: str, client: int, pid: int, fd: int) -> set[int]:
        """Record a file that was found; return its client, or nothing if the file cannot be used."""
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
        """Yield (process, descriptor) for everything that a pod's processes have open.

        A pod can make its cgroups too many to read. Then it is what its processes that made calls have open, and a
        file that another one has counts as hidden. Raises OSError.
        """
        entry = self.table.pods.get(pod)
        inside: tuple[int, ...] = ()
        try:
            inside = cgroup.pids(*entry.cgroups) if entry is not None else ()
        except NotSupportedError:
            pass
        except OSError as error:
            if error.errno in fd_budget.OUT_OF_FDS:
                raise
            _log.warning("only processes that made calls are searched for files", pod=pod, reason=str(error))
        for pid in dict.fromkeys((*self.table.pids_of(pod), *inside)):
            try:
                with os.scandir(f"/proc/{pid}/fd") as entries:
                    yield from ((pid, int(each.name)) for each in entries)
            except OSError as error:
                if error.errno in fd_budget.OUT_OF_FDS:
                    raise
