"""Looks for what a pod may have as managed memory and no process of it is charged for.

A process that maps such memory is charged for it. But any process can share its memory map (``clone(CLONE_VM)``,
``vfork``), and the mapping stays there when the one that made it ends or executes another program. So what a process no
longer shows stays charged to its pod, until all of the pod's processes have been looked at, also those that never made
a call. What those map is charged to the pod for as long as they show it.

Such a search takes as long as the pod likes. It needs the lock not to be held, and only a thread of the pod's own does
it, one at a time. Many processes that end meanwhile need one more.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.linux import kcmp, pod_processes, proc

#: Searches for nothing new take at most 1/_PARTS of the time, and others that nobody waits for half of it.
_PARTS = 10
#: A search can show that less is mapped than before, and only the next one then shows that nobody else has the rest.
_MOST_IN_A_ROW = 2
#: How long a process may take to show what it maps, and how often it is asked.
_PATIENCE_S, _LOOK_S = 0.02, 0.001

_log = structlog.get_logger("guardian")


@dataclass(frozen=True, slots=True)
class _Search:
    """A search, and what it left charged to the pod; its times are of the monotonic clock."""

    left: int
    began_s: float
    ended_s: float

    def rested(self, times: int) -> bool:
        """Tell whether so many times as long as it took have passed since."""
        return time.monotonic() >= self.ended_s + times * (self.ended_s - self.began_s)


_NEVER = _Search(0, 0.0, 0.0)


@dataclass(eq=False)
class ManagedSearch:
    """Searches the processes of each pod."""

    _table: ObjectTable
    _lock: threading.RLock
    #: Returns the charge for what a process maps, None if it does not show that; and charges the process.
    _mapped: Callable[[int], int | None]
    _charge: Callable[[int, int], object]
    #: Charges a pod for what no process of it is charged for.
    _charge_pod: Callable[[str, int], None]
    _turns: dict[str, threading.Lock] = field(default_factory=dict)
    #: How many searches discharged something, by pod; and by pod, the last search.
    discharges: Counter[str] = field(default_factory=Counter)
    _last: dict[str, _Search] = field(default_factory=dict)

    def is_due(self, pod: str) -> bool:
        """Tell whether a search may show that a pod is charged for too much."""
        left, last = self._left(pod), self._last.get(pod, _NEVER)
        return left > last.left or (left > 0 and last.rested(_PARTS - 1))

    def may_begin(self, pod: str) -> bool:
        """Tell whether one is due, also if nobody waits for it."""
        return self.is_due(pod) and self._last.get(pod, _NEVER).rested(1)

    def clear(self, pod: str) -> None:
        """Search if that may discharge something, or wait for the search that does."""
        if self.is_due(pod):
            with self._turn(pod):
                for _ in range(_MOST_IN_A_ROW):
                    if self.is_due(pod):
                        self._search(pod)

    def charge_all(self, pod: str) -> bool:
        """Charge a pod for all that its processes map, whoever mapped it; False if not all of them could be seen."""
        with self._turn(pod):
            return self._search(pod)

    def forget(self, pod: str) -> None:
        """Forget a pod that was retired."""
        self._turns.pop(pod, None)
        self._last.pop(pod, None)
        self.discharges.pop(pod, None)

    def _turn(self, pod: str) -> threading.Lock:
        return self._turns.setdefault(pod, threading.Lock())

    def _left(self, pod: str) -> int:
        return self._table.allocations.managed_left[pod]

    def _search(self, pod: str) -> bool:
        """Charge a pod for what its processes map, in place of what was left to it before; False if it stays."""
        began_s, owed = time.monotonic(), self._left(pod)
        found: int | None = None
        try:
            found = self._unclaimed(pod)
        except OSError as error:
            _log.info("managed memory of a pod is not all found", pod=pod, reason=str(error))
        with self._lock:
            if found is not None:  # what came meanwhile stays
                self._charge_pod(pod, max(0, self._left(pod) - owed) + found)
                self.discharges[pod] += found < owed
            self._last[pod] = _Search(owed if found is None else found, began_s, time.monotonic())
        return found is not None

    def _unclaimed(self, pod: str) -> int:
        """Charge the processes that are charged already, and return the charge for all others. Raises OSError.

        A process that shares the memory of one that was looked at has nothing of its own. One that executes a program
        between the looks at its mappings and its memory has left them to others, which are looked at as well.
        """
        managed, found, spaces = self._table.allocations.managed, 0, list[int]()
        for pid in pod_processes.each_task(lambda: self._processes(pod), lambda pid: pid in managed):
            size = self._shown(pid)
            with self._lock:
                if charged := pid in managed and self._table.processes.get(pid) == pod:
                    self._charge(pid, size)
            if size and not _shares_one(spaces, pid) and not charged:
                found += self._shown(pid)
        return found

    def _processes(self, pod: str) -> set[int]:
        entry = self._table.pods.get(pod)
        return pod_processes.processes_of(entry.cgroups if entry is not None else (), self._table.pids_of(pod))

    def _shown(self, pid: int) -> int:
        """Return the charge for what a process maps. Raises OSError if it does not show that for a while."""
        until_s = time.monotonic() + _PATIENCE_S
        while (size := self._mapped(pid)) is None:
            if time.monotonic() > until_s:
                raise OSError(errno.EBUSY, f"process {pid} does not show what it maps")
            time.sleep(_LOOK_S)
        return size


def _shares_one(spaces: list[int], pid: int) -> bool:
    """Tell whether a process shares the memory of one of these, which are in the kernel's order; else add it to them.

    One that cannot be compared shares none: that charges too much at worst. Nor does one whose first thread has ended:
    that thread has no memory to compare.
    """
    low, high = 0, len(spaces)
    while low < high:
        middle = (low + high) // 2
        order = kcmp.order_of_memory(pid, spaces[middle])
        if order is None:
            return False
        if order == 0:
            return not proc.is_headless(pid)
        low, high = (low, middle) if order < 0 else (middle + 1, high)
    spaces.insert(low, pid)
    return False
