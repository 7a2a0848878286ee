"""All processes of a pod leave their cards and come back, or none: whichever call fails, whichever process ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.checkpoint import sequence
from qgpu.errors import CheckpointError, RefusedError
from qgpu.model.checkpointer import GpuProcess, ProcessState
from qgpu.model.plane_api import PodInfo

RUNNING, LOCKED, OFF = ProcessState.RUNNING, ProcessState.LOCKED, ProcessState.CHECKPOINTED


class Table:
    """A driver in a table: the call with number ``fails`` is refused, and before call ``ends`` a process ends."""

    def __init__(self, states: Sequence[ProcessState], fails: int = 0, ends: int = 0) -> None:
        self.states: dict[int, ProcessState] = dict(enumerate(states))
        self.calls: list[tuple[str, int]] = []
        self._fails, self._ends = fails, ends

    @property
    def processes(self) -> list[GpuProcess]:
        """The processes that there were at first."""
        return [GpuProcess(pid) for pid in self.states]

    def state(self, process: GpuProcess) -> ProcessState | None:
        """Look it up."""
        return self.states.get(process.pid)

    def lock(self, process: GpuProcess, timeout_ms: int) -> None:
        """Hold it."""
        self._step("lock", process.pid, RUNNING, LOCKED)

    def checkpoint(self, process: GpuProcess) -> None:
        """Take it off."""
        self._step("checkpoint", process.pid, LOCKED, OFF)

    def restore(self, process: GpuProcess, moves: Mapping[str, str]) -> None:
        """Put it back."""
        self._step("restore", process.pid, OFF, LOCKED)

    def unlock(self, process: GpuProcess) -> None:
        """Let it go on."""
        self._step("unlock", process.pid, LOCKED, RUNNING)

    def alive(self, process: GpuProcess) -> bool:
        """Look it up."""
        return process.pid in self.states

    def free_memory(self, pgpu: int) -> int:
        """Tell of none: nobody asks."""
        return 0

    def check_host_memory(self, pod: PodInfo, beside: int) -> None:
        """Find everything well."""

    def close(self) -> None:
        """Nothing was opened."""

    def _step(self, call: str, pid: int, before: ProcessState, after: ProcessState) -> None:
        self.calls.append((call, pid))
        if len(self.calls) == self._ends:
            self.states.pop(pid, None)
        if len(self.calls) == self._fails or self.states.get(pid) is not before:
            raise CheckpointError("refused")
        self.states[pid] = after


COUNTS, CALLS = st.integers(1, 5), st.integers(0, 12)


@given(count=COUNTS, fails=CALLS, ends=CALLS)
def test_a_suspension_takes_all_off_or_lets_all_run(count: int, fails: int, ends: int) -> None:
    table = Table([RUNNING] * count, fails, ends)
    processes = table.processes
    try:
        sequence.suspend(table, processes, 1000, 0.0)  # type: ignore[arg-type]  # processes(): nobody asks
    except CheckpointError:
        wanted = RUNNING
    else:
        wanted = OFF
    if fails <= 2 * count:  # else it fails while that is undone, and the daemon tries again
        assert set(table.states.values()) <= {wanted}


@given(count=COUNTS, fails=CALLS, ends=CALLS)
def test_a_resumption_lets_all_run_or_leaves_all_off(count: int, fails: int, ends: int) -> None:
    table = Table([OFF] * count, fails, ends)
    processes = table.processes
    try:
        sequence.resume(table, processes, 0.0)  # type: ignore[arg-type]
    except CheckpointError:
        wanted = OFF
    else:
        wanted = RUNNING
    if fails <= count and ends == 0:
        assert set(table.states.values()) <= {wanted}


@given(states=st.lists(st.sampled_from([RUNNING, LOCKED, OFF]), min_size=1, max_size=5), resuming=st.booleans())
def test_whatever_was_cut_off_ends_at_one_place(states: list[ProcessState], resuming: bool) -> None:
    table = Table(states)
    off = sequence.settle(table, table.processes, 0.0, resuming=resuming)  # type: ignore[arg-type]

    assert set(table.states.values()) == {OFF if off else RUNNING}
    assert off == (set(states) == {OFF})


@given(count=COUNTS)
def test_all_are_locked_before_the_first_is_taken_off(count: int) -> None:
    table = Table([RUNNING] * count)
    sequence.suspend(table, table.processes, 1000, 0.0)  # type: ignore[arg-type]

    assert [call for call, _ in table.calls] == ["lock"] * count + ["checkpoint"] * count


@given(count=COUNTS)
def test_what_shows_once_all_are_locked_lets_all_run(count: int) -> None:
    table = Table([RUNNING] * count)

    def refuse() -> None:
        raise RefusedError("it has opened memory of another process")

    with pytest.raises(RefusedError, match="opened memory"):
        sequence.suspend(table, table.processes, 1000, 0.0, refuse)  # type: ignore[arg-type]

    assert set(table.states.values()) == {RUNNING}
    assert not [pid for call, pid in table.calls if call == "checkpoint"]


@given(count=COUNTS, before=st.sampled_from([RUNNING, LOCKED, OFF]))
def test_one_of_unknown_state_does_not_hold_the_others(count: int, before: ProcessState) -> None:
    table = Table([RUNNING] + [before] * count)
    processes, known = table.processes, table.state

    def state(process: GpuProcess) -> ProcessState | None:
        if process.pid == 0:
            raise CheckpointError("the driver cannot tell")
        return known(process)

    table.state = state  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="cannot tell"):
        sequence.settle(table, processes, 0.0, resuming=False)  # type: ignore[arg-type]

    assert set(table.states.values()) == {RUNNING}


@given(count=COUNTS)
def test_one_that_runs_again_before_it_leaves_lets_all_run(count: int) -> None:
    table = Table([RUNNING] * count)

    def unlock() -> None:
        table.states[count - 1] = RUNNING

    with pytest.raises(CheckpointError, match=f"process {count - 1}: refused"):
        sequence.suspend(table, table.processes, 1000, 0.0, unlock)  # type: ignore[arg-type]

    assert set(table.states.values()) == {RUNNING}
