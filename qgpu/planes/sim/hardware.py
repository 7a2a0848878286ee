"""The costs of a simulated pGPU, fitted to measurements of an H200 (see docs/simulator.md).

Numbers only. The engine, the gate worker and the loads decide when a cost applies.
"""

from __future__ import annotations

from dataclasses import dataclass

from qgpu.model import NS_PER_MS, NS_PER_S, NS_PER_US, hardware_traits
from qgpu.units import GIB


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of pGPU. Every duration is in ns; ``default_timeslice_us`` is RM's."""

    name: str = "Simulated H200"
    memory: int = 141 * GIB

    #: The driver's timeslice of a compute TSG without a set timeslice.
    default_timeslice_us: int = 2048
    #: One of RM's µs in a timeslice: RM counts in units of 1024 ns.
    timeslice_us_ns: int = hardware_traits.H200.timeslice_us_ns
    #: In every turn a TSG computes for this much less than its timeslice.
    timeslice_short_ns: int = 34 * NS_PER_US

    #: The cost of a context switch: inside the outgoing run, between runs, and inside the incoming run.
    save_ns: int = 55 * NS_PER_US
    gap_ns: int = hardware_traits.H200.gap_ns
    restore_ns: int = 57 * NS_PER_US

    #: A gate takes effect when its call returns; the calls of one pGPU run one after the other.
    close_ns: int = 330 * NS_PER_US
    open_ns: int = 170 * NS_PER_US
    contended_close_ns: int = 800 * NS_PER_US
    contended_open_ns: int = 400 * NS_PER_US

    #: The shortest time over which NVML reports utilization.
    utilization_ns: int = 200 * NS_PER_MS

    #: How long a plan holds without renewal.
    lease_ns: int = 1 * NS_PER_S

    #: Host side: from a launch to its work on the card, and from its end to the host's notice, plus jitter with this
    #: mean; and the latest wake-up of a sleeping host thread (the kernel's default timer slack).
    launch_ns: int = 8 * NS_PER_US
    notice_ns: int = 18 * NS_PER_US
    jitter_ns: int = 10 * NS_PER_US
    late_ns: int = 50 * NS_PER_US

    #: What it takes to move a GiB of a suspended process to host memory, and back.
    suspend_ns_per_gib: int = 550 * NS_PER_MS
    resume_ns_per_gib: int = 200 * NS_PER_MS

    @property
    def switch_ns(self) -> int:
        """Return the cost of one switch, from the last useful work of one context to the first of the next."""
        return self.save_ns + self.gap_ns + self.restore_ns

    def turn_ns(self, timeslice_us: int) -> int:
        """Return the useful work in one turn of a TSG with this timeslice."""
        return max(0, timeslice_us * self.timeslice_us_ns - self.timeslice_short_ns)


H200 = Hardware()
