"""The order in which the processes of one pod leave their cards and come back: all of them, or none.

All processes are locked before the first is taken off, so that none waits for the work of a suspended one. Only the
driver's state of each process counts; these functions keep no state. So each function works after another one was
interrupted, in this daemon or an earlier one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from qgpu.checkpoint.helper import HelperLostError
from qgpu.errors import CheckpointError, QgpuError, RefusedError
from qgpu.model.checkpointer import Checkpointer, GpuProcess, ProcessState

_NONE_MOVED: Mapping[str, str] = {}
#: How often a process's state is read while an interrupted call may still take effect.
_POLL_S = 0.1


def suspend(
    driver: Checkpointer,
    processes: Sequence[GpuProcess],
    lock_ms: int,
    late_s: float,
    locked: Callable[[], float | None] = lambda: None,
) -> None:
    """Take all processes off their cards; on an error all run again, and CheckpointError says which and why.

    ``lock_ms`` is how long a process's work may take to end. ``late_s`` is how long an interrupted call may still take
    effect; ``locked``, which is called when all processes are locked, may return another time for that. If it raises
    RefusedError, all run again.
    """
    at = processes[0]
    try:
        for at in processes:
            if driver.state(at) is ProcessState.RUNNING:
                driver.lock(at, lock_ms)
        late_s = locked() or late_s
        for at in processes:  # the driver refuses one that runs again, because it was unlocked or executed a program
            if driver.state(at) in (ProcessState.LOCKED, ProcessState.RUNNING):
                driver.checkpoint(at)
    except RefusedError as error:
        run_all(driver, processes, 0.0)
        raise RefusedError(str(error)) from error
    except QgpuError as error:
        lost = isinstance(error, HelperLostError)
        if not lost and driver.state(at) is None:  # it ended: suspend the others
            suspend(driver, [each for each in processes if each != at] or [at], lock_ms, late_s, locked)
            return
        run_all(driver, processes, late_s if lost else 0.0)
        raise CheckpointError(f"process {at.pid}: {error}") from error


def resume(
    driver: Checkpointer, processes: Sequence[GpuProcess], late_s: float, moves: Mapping[str, str] = _NONE_MOVED
) -> None:
    """Put all processes back and let them go on; on an error none is on a card, and CheckpointError says why."""
    at = processes[0]
    try:
        for at in processes:
            if driver.state(at) is ProcessState.CHECKPOINTED:
                driver.restore(at, moves)
    except QgpuError as error:
        _take_off(driver, processes, late_s if isinstance(error, HelperLostError) else 0.0)
        raise CheckpointError(f"process {at.pid}: {error}") from error
    run_all(driver, processes, 0.0, moves)


def settle(
    driver: Checkpointer,
    processes: Sequence[GpuProcess],
    late_s: float,
    moves: Mapping[str, str] = _NONE_MOVED,
    *,
    resuming: bool,
) -> bool:
    """Finish an interrupted operation: return whether all processes are off their cards; if not, let all run.

    ``resuming`` says that a call that puts a process back may still take effect; ``moves`` gives its target cards.
    """
    deadline = time.monotonic() + (late_s if resuming else 0.0)
    while _all_off(driver, processes, resuming=resuming):
        if time.monotonic() >= deadline:
            return True
        time.sleep(_POLL_S)
    run_all(driver, processes, late_s, moves if resuming else _NONE_MOVED)
    return False


def _all_off(driver: Checkpointer, processes: Sequence[GpuProcess], *, resuming: bool) -> bool:
    """Tell whether all are off. Not if the driver cannot tell of one that was to leave: the others wait no longer."""
    try:
        found = {driver.state(each) for each in processes} - {None, ProcessState.FAILED}
    except CheckpointError as error:
        if resuming or isinstance(error, HelperLostError):
            raise
        return False
    return found == {ProcessState.CHECKPOINTED}


def run_all(
    driver: Checkpointer, processes: Sequence[GpuProcess], late_s: float, moves: Mapping[str, str] = _NONE_MOVED
) -> None:
    """Put back and unlock all processes. Raises CheckpointError if one of them does not run in the end."""

    def put_back(each: GpuProcess) -> None:
        if driver.state(each) is ProcessState.CHECKPOINTED:
            driver.restore(each, moves)

    def let_go(each: GpuProcess) -> None:
        if driver.state(each) is ProcessState.LOCKED:
            driver.unlock(each)

    _repeat(driver, processes, (put_back, let_go), ProcessState.RUNNING, late_s)


def _take_off(driver: Checkpointer, processes: Sequence[GpuProcess], late_s: float) -> None:
    """Take processes off again that are back on a card and still locked."""

    def take_off(each: GpuProcess) -> None:
        if driver.state(each) is ProcessState.LOCKED:
            driver.checkpoint(each)

    _repeat(driver, processes, (take_off,), ProcessState.CHECKPOINTED, late_s)


def _repeat(
    driver: Checkpointer,
    processes: Sequence[GpuProcess],
    steps: Sequence[Callable[[GpuProcess], None]],
    wanted: ProcessState,
    late_s: float,
) -> None:
    """Repeat all steps with every process for ``late_s``. Raises CheckpointError unless all are as wanted then."""
    deadline = time.monotonic() + late_s
    while True:
        problem: QgpuError | None = None
        for step in steps:
            for each in processes:
                try:
                    step(each)
                except QgpuError as error:  # it has just ended, or an interrupted call is still in progress
                    problem = error
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    for each in processes:  # a process that failed in the driver stays failed; the driver's error was raised before
        if (state := driver.state(each)) not in (wanted, ProcessState.FAILED, None):
            raise CheckpointError(
                f"process {each.pid} is {state}, not {wanted}: {problem or 'the driver says no more'}"
            )
