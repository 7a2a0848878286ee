"""What is to be the next guardian: it has everything loaded, every listener in hand and the journal read up to now.

The daemon keeps one, and lets it begin when the guardian is lost. Where the daemon is gone too it begins by itself, for
then nobody is left who could: what tells it is that no process has the journal. Nothing is done to a pod here.
"""

from __future__ import annotations

import os
import select
import time
from typing import Any

from qgpu.errors import AlreadyRunningError
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover.journal import Journal
from qgpu.ipc import wire

#: How often it is read what the guardian has written: what is left to read when it is lost takes a pod's time.
_FOLLOW_MS = 250
#: How long after its daemon's end it is waited whether the guardian ends too.
_ORPHAN_S = 0.3
#: For so long a guardian that was killed may have the journal: a call of the driver's may keep a thread of it.
_DEATH_S = 2.0
_LOOK_S = 0.005
#: So many mappings that are gone are forgotten at a time.
_AT_ONCE = 20_000


class Standby:
    """``daemon`` is the connection to who keeps it."""

    def __init__(self, journal: Journal, daemon: wire.Connection) -> None:
        self.table = ObjectTable()
        #: The pods' listeners by their numbers, each with its pod.
        self.listeners: dict[int, tuple[str, int]] = {}
        self._journal = journal
        self._daemon = daemon

    def wait(self) -> bool:
        """Return when it is time to begin, with the journal owned and read; False when nobody needs a guardian.

        Raises AlreadyRunningError where it was told to, and another one has the journal.
        """
        poll = select.poll()
        poll.register(self._daemon, select.POLLIN)
        while True:
            self._follow()
            if not poll.poll(_FOLLOW_MS):
                continue
            alive = self._daemon.fill()
            while (message := self._daemon.next_buffered()) is not None:
                if message[0]["op"] == "end":
                    return False
                if message[0]["op"] == "begin":
                    self._own(_DEATH_S if message[0]["killed"] else 0)
                    return True
                self._hold(*message)
            if not alive:
                return self._stands_in()

    def say(self, message: dict[str, Any]) -> None:
        """Tell the daemon, if there is one."""
        try:
            self._daemon.send(message)
        except OSError:
            return

    def _hold(self, message: dict[str, Any], fds: list[int]) -> None:
        """Take listeners over: those that were left to us when we were started, or one that has come since; or let go.

        One for which there was no descriptor left is the daemon's to hand over.
        """
        for number, (pod, fd) in message.get("inherited", {}).items():
            os.set_inheritable(fd, False)
            self.listeners[int(number)] = pod, fd
        number = message.get("number", 0)
        if number in self.listeners:
            os.close(self.listeners.pop(number)[1])
        if fds:
            self.listeners[number] = message["pod"], fds[0]

    def _stands_in(self) -> bool:
        try:
            self._own(_ORPHAN_S)
        except AlreadyRunningError:
            return False
        return True

    def _own(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._journal.own()
            except AlreadyRunningError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK_S)
            else:
                self._follow()
                return

    def _follow(self) -> None:
        """Take in what has been written since."""
        anew, facts = self._journal.read()
        if anew:
            self.table = ObjectTable()
        for fact in facts:
            self.table.note(fact)
        self.table.allocations.forget_some(_AT_ONCE)
