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

    Of those that soon end, only the cgroups tell. A pod can make them too many to read.
    """
    found: set[int] = set()
    with suppress(NotSupportedError):
        try:
            found.update(cgroup.pids(*tops))
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True):
        with suppress(FileNotFoundError, ProcessLookupError):
            if pid not in found and any(cgroup.within(cgroup.of(pid), top) for top in tops):
                found.add(pid)
    return found


def each_task(listing: Callable[[], Iterable[int]], first: Callable[[int], bool] = lambda _: False) -> Iterator[int]:
    """Yield every process or thread of listings, until one has only those that were yielded before. Raises OSError.

    So whatever one has is seen, even if it ends meanwhile and leaves that to another one. They are told apart by number
    and start time. One that has ended since it was listed is new, because a listing of /proc may lack those behind it.
    Of one listing, those come first that ``first`` says so of.
    """
    seen: set[tuple[int, str]] = set()
    deadline, listings = time.monotonic() + _PATIENCE_S, 0
    while new := {(task, proc.start_time(task)) for task in listing()} - seen:
        yield from sorted((task for task, _ in new), key=lambda task: not first(task))
        seen |= new
        listings += 1
        if time.monotonic() > deadline and listings >= _LISTINGS:
            raise OSError(errno.EBUSY, "processes or threads come and go")
