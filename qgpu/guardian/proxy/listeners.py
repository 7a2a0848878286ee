"""All pods' seccomp listeners. Each has a slot in the journal, where the next guardian finds the call being handled."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

from qgpu.errors import RefusedError
from qgpu.guardian.failover.journal import Journal
from qgpu.linux import fd_budget, kcmp
from qgpu.linux.seccomp_notify import Listener, UnansweredCall, has_call, read_slot

#: A listener without processes is given up by its thread at once, unless that waits for memory or for the driver. After
#: this long, the daemon is told.
_STUCK_S = 10.0
#: How many listeners each pod may have: its first process tree, and those of some `qgpuctl exec`.
_GUARANTEED = 4


class Listeners(dict[int, tuple[str, Listener]]):
    """Each listener with its pod, by number."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal
        self._next = 1 + max(journal.listeners(), default=0)
        #: The pods that a dead guardian served, until their mappings are charged.
        self.inherited: set[str] = set()
        #: By listener without processes, when that was seen first, in s.
        self._ended_s: dict[int, float] = {}

    def add(self, pod: str, fd: int, number: int | None = None) -> int:
        """Take over a pod's listener and return its number. Raises RefusedError.

        A pod beyond its fair share of listeners gets no new one. A dead guardian's listeners (``number`` is given) are
        always taken over, also one that it had not named to anybody yet.
        """
        number = self._number_of_unanswered_call(fd) if number is None else number
        if number is not None:
            self.inherited.add(pod)
        else:
            own = sum(other == pod for other, _ in self.values())
            if not fd_budget.within_fair_share(own, self._journal.free_slots, _GUARANTEED):
                raise RefusedError(f"pod {pod}: {own} of its process trees are watched already; end some first")
            number = self._next
        self._next = max(self._next, number + 1)
        self[number] = (pod, Listener(fd, self._journal.slot(number), number))
        return number

    def remove(self, number: int) -> str:
        """Forget a listener and free its slot; return its pod."""
        pod, _ = self.pop(number)
        self._journal.release(number)
        return pod

    def number_of(self, pod: str, fd: int) -> int | None:
        """Return the number of a pod's listener that is here already; None if it is not."""
        us, own = os.getpid(), ((number, listener.fd) for number, (owner, listener) in self.items() if owner == pod)
        return next((number for number, known in own if kcmp.same_file(us, known, us, fd)), None)

    def live_pods(self) -> set[str]:
        """Name the pods that have a process behind one of their listeners."""
        return {pod for pod, listener in self.values() if listener.has_processes()}

    def stuck(self) -> int:
        """Return how many listeners had no process ``_STUCK_S`` ago and still wait for the end of a call."""
        numbers = {listener.fd: number for number, (_, listener) in self.items()}
        poll, now_s = select.poll(), time.monotonic()
        for fd in numbers:
            poll.register(fd, 0)
        ended = [numbers[fd] for fd, found in poll.poll(0) if found & select.POLLHUP]
        self._ended_s = {number: self._ended_s.get(number, now_s) for number in ended}
        return sum(now_s - since_s >= _STUCK_S for since_s in self._ended_s.values())

    def unanswered_call(self, number: int) -> UnansweredCall | None:
        """Return the call that a dead guardian received on a listener and did not answer."""
        return read_slot(self._journal.slot(number))

    def release_slots(self) -> None:
        """Free the slots of listeners that nobody has, but for those with a call whose thread still waits."""
        for number in self._journal.listeners() - self.keys():
            left = self.unanswered_call(number)
            if left is None or not Path(f"/proc/{left.call.tid}").exists():
                self._journal.release(number)

    def _number_of_unanswered_call(self, fd: int) -> int | None:
        """Return the number by which a dead guardian received a call from a listener that it named to nobody."""
        for number in self._journal.listeners() - self.keys():
            left = self.unanswered_call(number)
            if left is not None and has_call(fd, left.call.id):
                return number
        return None
