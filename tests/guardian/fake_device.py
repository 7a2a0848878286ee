"""A card that does nothing, where the guardian looks for cards."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class FakeDevice:
    """Card 0. Its channels are never moved."""

    minor: int
    index = instance = 0
    gpu_id, pci = 0x600, "0000:01:00.0"

    def uuid(self):
        return bytes(16)

    def time_ns(self):
        return time.monotonic_ns()

    def set_channels(self, channels, *, disabled, preempt=True):
        return None
