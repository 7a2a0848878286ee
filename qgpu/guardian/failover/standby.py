"""The standby guardian: fully loaded, holding every listener, and with the journal read up to now.

The daemon keeps one, and promotes it when the guardian is lost. If the daemon is gone too, the standby promotes itself
once no process owns the journal. A standby changes nothing in a pod.
"""

from __future__ import annotations

import gc
import os
import select
import time
from contextlib import suppress
from typing import Any

from qgpu.errors import AlreadyRunningError
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover.journal import Journal
from qgpu.ipc import wire

#: How often the journal is read: what is unread when the guardian is lost delays pods.
_FOLLOW_MS = 250
#: After its daemon's end, how long the standby waits for the guardian to end too.
_ORPHAN_S = 0.3
#: How long a killed guardian may still own the journal: a driver call may keep one of its threads.
_DEATH_S = 2.0
_LOOK_S = 0.005
#: How many mappings that are gone are forgotten at a time.
_AT_ONCE = 20_000


class Standby:
    """``daemon`` is the connection to the daemon that keeps it."""

    def __init__(self, journal: Journal, daemon: wire.Connection) -> None:
        self.table = ObjectTable()
        #: The pods' listeners by number, each with its pod.
        self.listeners: dict[int, tuple[str, int]] = {}
        self._journal = journal
        self._daemon = daemon

    def wait(self) -> bool:
        """Return True when this process must become the guardian, with the journal owned and read; False to end.

        Raises AlreadyRunningError if it was promoted while another process owns the journal.
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
                with suppress(AlreadyRunningError):
                    self._own(_ORPHAN_S)
                    return True
                return False

    def say(self, message: dict[str, Any]) -> None:
        """Send a message to the daemon, if there is one."""
        with suppress(OSError):
            self._daemon.send(message)

    def _hold(self, message: dict[str, Any], fds: list[int]) -> None:
        """Take over the inherited listeners or a new one, if a descriptor was free for it; or close one."""
        for number, (pod, fd) in message.get("inherited", {}).items():
            os.set_inheritable(fd, False)
            self.listeners[int(number)] = pod, fd
        number = message.get("number", 0)
        if number in self.listeners:
            os.close(self.listeners.pop(number)[1])
        if fds:
            self.listeners[number] = message["pod"], fds[0]

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
        anew, facts = self._journal.read()
        if anew:
            self.table = ObjectTable()
        gc.disable()  # among a million facts, a search for garbage takes half as long as reading them
        for fact in facts:
            self.table.note(fact)
        gc.enable()
        self.table.allocations.forget_some(_AT_ONCE)
