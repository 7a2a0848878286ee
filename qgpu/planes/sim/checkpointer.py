"""Checkpoints of simulated processes: a load's number is its pid, and moving it takes time by its size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from qgpu.errors import CheckpointError, UnknownNameError
from qgpu.model.checkpointer import GpuProcess, ProcessState
from qgpu.model.plane_api import PodInfo
from qgpu.planes.sim.hardware import H200
from qgpu.planes.sim.load import Load
from qgpu.units import GIB

_Step = Callable[[Load], None]


class _Host(Protocol):
    """What this needs of the simulated host."""

    def loads_of(self, pod: str) -> list[int]: ...
    def free_memory(self, pgpu: int) -> int: ...
    def at_load(self, number: int) -> AbstractContextManager[Load]: ...
    def pass_time(self, duration_ns: int) -> None: ...
    def move_load(self, number: int, moves: Mapping[str, str]) -> None: ...


class SimCheckpointer:
    """The loads of a simulated host as processes that can leave their card."""

    def __init__(self, host: _Host) -> None:
        self._host = host

    def processes(self, pod: PodInfo) -> Sequence[GpuProcess]:
        """List the pod's loads."""
        return [GpuProcess(number) for number in self._host.loads_of(pod.name)]

    def check_restorable(self, pod: PodInfo) -> None:
        """Find everything well: simulated loads share nothing."""

    def alive(self, process: GpuProcess) -> bool:
        """Tell whether the load has not ended."""
        return self.state(process) is not None

    def check_host_memory(self, pod: PodInfo, beside: int) -> None:
        """Let everything fit: simulated memory takes no room."""

    def check_moves(self) -> None:
        """Let every load move."""

    def host_room(self) -> int | None:
        """Return no bound: simulated memory takes no room."""
        return None

    def free_memory(self, pgpu: int) -> int:
        """Return what no load holds."""
        return self._host.free_memory(pgpu)

    def state(self, process: GpuProcess) -> ProcessState | None:
        """Return the load's state."""
        try:
            with self._host.at_load(process.pid) as load:
                return None if load.done else load.state
        except UnknownNameError:
            return None

    def lock(self, process: GpuProcess, timeout_ms: int) -> None:  # noqa: ARG002 - simulated work can stop at any time
        """Hold the load's launches."""
        self._step(process, ProcessState.RUNNING, Load.lock)

    def checkpoint(self, process: GpuProcess) -> None:
        """Take the load off the card."""
        self._pass_time(process, H200.suspend_ns_per_gib)
        self._step(process, ProcessState.LOCKED, Load.checkpoint)

    def restore(self, process: GpuProcess, moves: Mapping[str, str]) -> None:
        """Put the load back, on another pGPU if ``moves`` names one for its own."""
        self._pass_time(process, H200.resume_ns_per_gib)
        if moves:
            self._host.move_load(process.pid, moves)
        self._step(process, ProcessState.CHECKPOINTED, self._put_back)

    def unlock(self, process: GpuProcess) -> None:
        """Let the load go on."""
        self._step(process, ProcessState.LOCKED, Load.unlock)

    def close(self) -> None:
        """Do nothing: nothing was opened."""

    def _put_back(self, load: Load) -> None:
        if self._host.free_memory(load.pgpu) < load.workload.memory:
            raise CheckpointError(f"pGPU {load.pgpu} is out of memory")
        load.restore()

    def _pass_time(self, process: GpuProcess, ns_per_gib: int) -> None:
        try:
            with self._host.at_load(process.pid) as load:
                size = load.workload.memory
        except UnknownNameError:
            size = 0
        self._host.pass_time(size * ns_per_gib // GIB)

    def _step(self, process: GpuProcess, expected: ProcessState, step: _Step) -> None:
        try:
            with self._host.at_load(process.pid) as load:
                if load.state is not expected:
                    raise CheckpointError(f"load {process.pid} is {load.state}, not {expected}")
                step(load)
        except UnknownNameError as error:
            raise CheckpointError(f"load {process.pid} has ended") from error
