"""Checks that no other process shares a process's table of open descriptors, as after clone(CLONE_FILES)."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from contextlib import suppress

from qgpu.linux import kcmp, proc
from qgpu.linux.pod_processes import Task, each_task

#: For how many processes, and of how many others each, it is remembered that they share no table.
_MOST_PROCESSES, _MOST_OTHERS = 64, 512


class DescriptorTables:
    """Remembers which processes share no table with which others: they never will.

    A task that is made gets the table of its maker or a copy, and may replace its own by a copy later. None can take a
    table that exists. (In the first releases of 5.10 and before, one that fails to execute a program takes its own
    back.)
    """

    def __init__(self) -> None:
        self._separate: dict[Task, set[Task]] = {}

    def check_alone(self, pid: int, processes: Callable[[], Iterable[int]]) -> None:
        """Raise OSError if another process shares the table of a process whose threads, but one of them, are stopped.

        ``processes`` lists all that may. Each thread of another process may have a table of its own, so each is looked
        at. One that has ended by then may have shared the table, and have made another process that does. So this goes
        on until a listing has only processes that were looked at before. What started in this clock tick is not
        remembered: where the kernel has few pids, another one with its number may start in the same tick.
        """
        now = proc.clock_ticks()
        me = (pid, proc.start_time(pid))
        seen = self._separate.get(me, set()).copy()
        for other in each_task(lambda: set(processes()) - {pid}, seen=seen):
            with suppress(FileNotFoundError, ProcessLookupError):
                _check_apart(pid, other)
        if _is_older(me, now):
            self._remember(me, {task for task in seen if _is_older(task, now)})

    def _remember(self, process: Task, others: set[Task]) -> None:
        if len(self._separate) >= _MOST_PROCESSES and process not in self._separate:
            self._separate.clear()
        self._separate[process] = others if len(others) <= _MOST_OTHERS else set()


def _is_older(task: Task, ticks: int) -> bool:
    return bool(task[1]) and int(task[1]) < ticks


def _check_apart(pid: int, other: int) -> None:
    for thread in each_task(lambda: proc.threads(other)):
        if kcmp.same_table(pid, thread):
            raise OSError(errno.EPERM, f"thread {thread} shares the descriptors of process {pid}")
