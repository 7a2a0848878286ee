"""The interface by which a plane takes the processes of a pod off their cards and puts them back.

A process goes through the driver's own states: running, locked (its CUDA calls wait), checkpointed (nothing of it is on
a card; its memory lies in its own host memory), locked again, running. The order over a pod's processes, and what
happens when one of them fails, is in ``qgpu/checkpoint/sequence.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from qgpu.model.plane_api import PodInfo


class ProcessState(StrEnum):
    """The state of a process in the driver (CUprocessState, cuda.h)."""

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that uses a card. ``started`` is its start time in clock ticks, because a pid may be reused."""

    pid: int
    started: str = ""


class Checkpointer(Protocol):
    """The driver's checkpoints on one plane. Every call may take long; a call that fails raises a QgpuError."""

    def processes(self, pod: PodInfo) -> Sequence[GpuProcess]:
        """Return the pod's processes that use a card now.

        Raises RefusedError if it is known that one of them cannot be taken off, NotSupportedError if none can.
        """

    def check_restorable(self, pod: PodInfo) -> None:
        """Check that its processes hold nothing that cannot be put back. Raises RefusedError."""

    def alive(self, process: GpuProcess) -> bool:
        """Tell without waiting whether a process still runs. Raises CheckpointError if that cannot be seen."""

    def check_host_memory(self, pod: PodInfo, beside: int) -> None:
        """Check that what the pod holds on cards fits into host memory. Raises RefusedError.

        ``beside`` is how many bytes other pods are about to bring there.
        """

    def check_moves(self) -> None:
        """Check that processes can be put back on other cards. Raises NotSupportedError."""

    def host_room(self) -> int | None:
        """Return how many more bytes of suspended pods host memory can take; None: no bound."""

    def free_memory(self, pgpu: int) -> int:
        """Return how many bytes of a card are free."""

    def state(self, process: GpuProcess) -> ProcessState | None:
        """Return a process's state; None if it has ended."""

    def lock(self, process: GpuProcess, timeout_ms: int) -> None:
        """Hold the process's CUDA calls and wait for the work it has begun, at most this long."""

    def checkpoint(self, process: GpuProcess) -> None:
        """Take a locked process off its cards."""

    def restore(self, process: GpuProcess, moves: Mapping[str, str]) -> None:
        """Put a checkpointed process back, locked; ``moves`` maps UUIDs of its cards to others (empty: the same)."""

    def unlock(self, process: GpuProcess) -> None:
        """Let a locked process go on."""

    def close(self) -> None:
        """Give up what was opened. Safe to call twice, also from another thread, where it ends a call that hangs."""
