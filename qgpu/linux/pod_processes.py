"""Lists every process of a pod, also those that never made a call, whatever they do meanwhile to be missed."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from qgpu.errors import NotSupportedError
from qgpu.linux import cgroup, proc

#: For how long, and in how many listings, processes and threads may come and go.
_PATIENCE_S, _LISTINGS = 1.0, 4

#: How the kernel does not tell a process's cgroup: it has ended, or kernels before 6.8 find the path too long.
_UNTOLD = (errno.ENOENT, errno.ESRCH, errno.ENAMETOOLONG)
#: A process or thread: its number and when it started, empty once it has ended.
Task = tuple[int, str]


def processes_of(cgroups: Iterable[str], known: Iterable[int]) -> set[int]:
    """List the processes in cgroups and below them, and ``known`` ones. Raises OSError.

    One that is there all the time is in the list, wherever in the cgroups it is moved meanwhile.
    """
    tops, found = tuple(cgroups), set(known)
    if not tops:
        return found
    inside: set[int] | None = None
    with suppress(NotSupportedError):
        inside = cgroup.undivided_pids(*tops)
    return found | (inside if inside is not None else _asked_of_each(tops))


def _asked_of_each(tops: tuple[str, ...]) -> set[int]:
    """Ask the cgroups, and each process of the host for its own: that is one answer, wherever it moves.

    Of those that soon end, only the cgroups tell. A pod can make them too many to read. One that ends while it is asked
    may have been there, so it is in the list. The newest come first, because those are most likely to end. Only where
    numbers begin again can a process be younger than one with a higher number, and so be missed; the second pass finds
    it.
    """
    found: set[int] = set()
    with suppress(NotSupportedError):
        try:
            found.update(cgroup.pids(*tops))
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
    asked = found.copy()
    for _ in range(2):
        new = {int(name) for name in os.listdir("/proc") if name.isdigit()} - asked
        found.update(pid for pid in sorted(new, reverse=True) if _may_be_in(tops, pid))
        asked |= new
    return found


def _may_be_in(tops: tuple[str, ...], pid: int) -> bool:
    try:
        path = cgroup.of(pid)
    except OSError as error:
        if error.errno not in _UNTOLD:
            raise
        return True
    return any(cgroup.within(path, top) for top in tops)


def each_task(
    listing: Callable[[], Iterable[int]],
    first: Callable[[int], bool] = lambda _: False,
    seen: set[Task] | None = None,
) -> Iterator[int]:
    """Yield every process or thread of listings, until one has only those that were yielded before. Raises OSError.

    So whatever one has is seen, even if it ends meanwhile and leaves that to another one. They are told apart by number
    and start time. One that has ended since it was listed is new, because a listing of /proc may lack those behind it.
    Of one listing, those come first that ``first`` says so of. ``seen`` are left out, and get what was yielded.
    """
    seen = set() if seen is None else seen
    deadline, listings = time.monotonic() + _PATIENCE_S, 0
    while new := {(task, proc.start_time(task)) for task in listing()} - seen:
        yield from sorted((task for task, _ in new), key=lambda task: not first(task))
        seen |= new
        listings += 1
        if time.monotonic() > deadline and listings >= _LISTINGS:
            raise OSError(errno.EBUSY, "processes or threads come and go")
