"""Faults of the simulated driver, as simnv/fault.c takes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FAULTS = Path("/proc/driver/nvidia/faults")
POWER = Path("/proc/driver/nvidia/suspend")
ENFORCE = Path("/sys/module/qgpu/parameters/enforce")


@dataclass(frozen=True, slots=True)
class Fault:
    """What meets a call: RM's status, how often (0: until cleared), and what is done all the same."""

    call: str
    status: int
    count: int = 0
    effect: int = 0
    #: -1: until cleared; less: ms of polling.
    stall_ms: int = 0

    def __str__(self) -> str:
        return f"{self.call} {self.status:x} {self.count} {self.effect} {self.stall_ms}"


fault = Fault


def inject(faults: Iterable[Fault]) -> None:
    FAULTS.write_text("\n".join(map(str, faults)))


def cleared() -> None:
    """End all faults: RM answers again."""
    FAULTS.write_text("clear")
