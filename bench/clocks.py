"""Compare the host's clock with the GPU's: how fast they drift apart, and how accurately that is known.

Latencies are measured with the host's clock, and kernels are timed with the GPU's. Both must agree on the length of a
millisecond. Their absolute offset does not matter (the GPU's clock is set once, when the driver starts).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from figures import Figure, at_most

from qgpu.nvidia.rm_client import RmClient
from qgpu.nvidia.rm_device import open_devices

_READINGS = 200


@dataclass(frozen=True, slots=True)
class Reading:
    """At ``host_ns`` (CLOCK_MONOTONIC) the GPU's clock was ahead by ``ahead_ns``, plus or minus ``error_ns``."""

    host_ns: int
    ahead_ns: int
    error_ns: int


def read() -> Reading:
    """Read both clocks many times and keep the fastest reading."""
    client = RmClient()
    try:
        card = open_devices(client)[0]
        readings = []
        for _ in range(_READINGS):
            before_ns = time.perf_counter_ns()
            gpu_ns = card.time_ns()
            after_ns = time.perf_counter_ns()
            middle_ns = (before_ns + after_ns) // 2
            readings.append(Reading(middle_ns, gpu_ns - middle_ns, (after_ns - before_ns + 1) // 2))
        return min(readings, key=lambda reading: reading.error_ns)
    finally:
        client.close()


def agreement(first: Reading, last: Reading) -> Figure:
    """Return by how many parts per million the GPU's clock ran faster than the host's between two readings."""
    passed_ns = last.host_ns - first.host_ns
    ppm = (last.ahead_ns - first.ahead_ns) / passed_ns * 1e6
    error_ppm = (first.error_ns + last.error_ns) / passed_ns * 1e6
    required, holds = at_most(1000, " ppm")
    note = (
        f"GPU against host over {passed_ns / 1e9:.0f} s, known to {error_ppm:.3f} ppm; a reading to "
        f"{max(first.error_ns, last.error_ns) / 1000:.1f} µs; latencies by the host's clock, kernels by the GPU's"
    )
    return Figure("clock_drift_ppm", ppm, (), required, holds(abs(ppm)), note)
