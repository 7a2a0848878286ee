"""Finds a control file that a pod has moved: its client lives, and no descriptor that is known leads to it.

A timeslice is set through the file of the TSG's client. A process can have a million descriptors, so a thread for each
pod looks through them, slowly. Until it finds the file, the client is lost: ``enforce.py`` keeps its TSGs off the card.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass, field

import structlog

from qgpu import cgroup
from qgpu.errors import NotSupportedError
from qgpu.guardian import room
from qgpu.guardian.register import Register

_log = structlog.get_logger("guardian")

#: After this many descriptors a search rests, so that it takes little of a processor.
_AT_ONCE, _REST_S = 64, 0.01
#: A search of this length without success makes the client lost; it goes on.
_PATIENCE_S = 1.0
#: A client that was not found is searched for again after this long.
_AGAIN_S = 5.0


@dataclass(slots=True)
class FileSearch:
    """All searches. ``reaches(pid, fd, client)`` tells whether a descriptor of a process leads to an RM client."""

    register: Register
    reaches: Callable[[int, int, int], bool]
    exists: Callable[[int], bool]
    #: Told of a descriptor that leads to a client: (client, process, descriptor).
    found: Callable[[int, int, int], None]
    #: Told that a client is lost.
    missed: Callable[[], None]
    #: Clients that RM has and that could not be reached.
    lost: set[int] = field(default_factory=set)
    #: By pod, the clients to search for.
    _wanted: dict[str, set[int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def want(self, client: int) -> None:
        """Search for a client's file, unless somebody does already."""
        entry = self.register.clients.get(client)
        if entry is None:
            return
        with self._lock:
            if (wanted := self._wanted.get(entry.pod)) is not None:
                wanted.add(client)
                return
            self._wanted[entry.pod] = {client}
        with suppress(RuntimeError):  # no thread is to be had: the next plan asks again
            threading.Thread(target=self._work, args=(entry.pod,), name="qgpu-search", daemon=True).start()
            return
        del self._wanted[entry.pod]

    def _work(self, pod: str) -> None:
        """Search for a pod's clients until none is wanted."""
        while True:
            with self._lock:
                wanted = self._wanted[pod]
                for clients in (wanted, self.lost):
                    clients.intersection_update(self.register.clients)
                if not wanted:
                    del self._wanted[pod]
                    return
                client = min(wanted)
            if self._is_settled(pod, client):
                with self._lock:
                    wanted.discard(client)
                    self.lost.discard(client)
            else:
                time.sleep(_AGAIN_S)

    def _is_settled(self, pod: str, client: int) -> bool:
        """Find a client's file, or see that there is no such client any more."""
        try:
            return self._finds(pod, client)
        except OSError as error:  # we could not look, which tells nothing
            _log.warning("no descriptor is left: a file is searched for again", pod=pod, reason=str(error))
            return False

    def _finds(self, pod: str, client: int) -> bool:
        until = time.monotonic() + _PATIENCE_S
        with closing(self._descriptors(pod)) as files:
            for count, (pid, fd) in enumerate(files):
                if self.reaches(pid, fd, client):
                    self.found(client, pid, fd)
                    return True
                if count % _AT_ONCE == _AT_ONCE - 1:
                    if not self.exists(client):
                        return True
                    time.sleep(_REST_S)
                if time.monotonic() > until:
                    self._lose(pod, client)
        if not self.exists(client):
            return True
        self._lose(pod, client)
        return False

    def _lose(self, pod: str, client: int) -> None:
        if client not in self.lost:
            _log.warning("control file not found: its client is kept off the card", pod=pod, client=client)
            self.lost.add(client)
            self.missed()

    def _descriptors(self, pod: str) -> Generator[tuple[int, int]]:
        """Yield (process, descriptor) of all that a pod's processes have open."""
        entry = self.register.pods.get(pod)
        inside: tuple[int, ...] = ()
        with suppress(NotSupportedError):
            inside = cgroup.pids(entry.cgroup) if entry is not None else ()
        known = [pid for pid, of in list(self.register.processes.items()) if of == pod]
        for pid in dict.fromkeys((*known, *inside)):
            try:
                with os.scandir(f"/proc/{pid}/fd") as entries:
                    yield from ((pid, int(each.name)) for each in entries)
            except OSError as error:
                if error.errno in room.NONE_LEFT:
                    raise
