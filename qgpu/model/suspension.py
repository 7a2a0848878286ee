"""Where a pod's processes are: on their cards, off them, or on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from qgpu.model.checkpointer import GpuProcess


class Residency(StrEnum):
    """Whether a pod is on its cards (running), off them (suspended), or on the way."""

    RUNNING = "running"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"

    @property
    def moving(self) -> bool:
        """Tell whether an operation is under way."""
        return self in (Residency.SUSPENDING, Residency.RESUMING)


@dataclass(frozen=True, slots=True)
class Suspension:
    """What the daemon knows of where a pod's processes are."""

    residency: Residency = Residency.RUNNING
    #: When that began, in seconds since the epoch; 0 if it never changed.
    since_s: float = 0.0
    #: The processes that are off their cards, or on the way.
    processes: tuple[GpuProcess, ...] = ()
    #: What they held, in bytes by pGPU, when they were suspended.
    memory: Mapping[int, int] = field(default_factory=dict)
    #: Why the last operation did not do what was asked; empty if it did.
    error: str = ""
    #: On the way to other cards: their UUIDs by those it leaves. It has grants on both meanwhile.
    moves: Mapping[str, str] = field(default_factory=dict)
    #: It makes room for others, and comes back by itself when there is room.
    yielded: bool = False
    #: For how long a call that was cut off may still take effect, in seconds.
    late_s: float = 0.0
