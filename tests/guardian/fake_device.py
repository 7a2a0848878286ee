"""A card that does nothing, where the guardian looks for cards."""

from __future__ import annotations

import time
from dataclasses import dataclass

from qgpu.model.plane_api import MigInstance


@dataclass(frozen=True)
class FakeDevice:
    """Card 0, or a MIG instance of it. Its channels are never moved."""

    minor: int
    index: int = 0
    instance: int = 0
    mig: MigInstance | None = None
    gpu_id, pci = 0x600, "0000:01:00.0"

    def uuid(self):
        return bytes(16)

    def grces(self):
        return frozenset()

    def see_all_instances(self):
        return None

    def time_ns(self):
        return time.monotonic_ns()

    def set_channels(self, channels, *, disabled, preempt=True):
        return None
