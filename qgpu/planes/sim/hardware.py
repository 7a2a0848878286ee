"""The prices a simulated pGPU charges, fitted to measurements of an H200 (see docs/simulator.md).

Numbers only: who pays them and when is decided by the engine, the gate worker and the loads.
"""

from __future__ import annotations

from dataclasses import dataclass

from qgpu.model import NS_PER_MS, NS_PER_S, NS_PER_US, hardware_traits

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of pGPU. Every duration is in ns; ``default_timeslice_us`` is RM's."""

    name: str = "Simulated H200"
    memory: int = 141 * GIB

    #: What the driver gives a compute TSG that nobody set.
    default_timeslice_us: int = 2048
    #: RM's µs of a timeslice last so long: it counts in units of 1024 ns.
    timeslice_us_ns: int = hardware_traits.H200.timeslice_us_ns
    #: A TSG computes this much less than its timeslice in every turn.
    timeslice_short_ns: int = 34 * NS_PER_US

    #: A switch between contexts: seen inside the outgoing run, between runs, and inside the incoming run.
    save_ns: int = 55 * NS_PER_US
    gap_ns: int = hardware_traits.H200.gap_ns
    restore_ns: int = 57 * NS_PER_US

    #: A gate takes effect when its call returns; calls of one pGPU go one after the other.
    close_ns: int = 330 * NS_PER_US
    open_ns: int = 170 * NS_PER_US
    contended_close_ns: int = 800 * NS_PER_US
    contended_open_ns: int = 400 * NS_PER_US

    #: Over how long NVML's utilisation is told, at least.
    utilization_ns: int = 200 * NS_PER_MS

    #: How long a plan holds without renewal.
    lease_ns: int = 1 * NS_PER_S

    #: Host side: from launch to work on the card, from its end to the host knowing (plus jitter of this mean),
    #: and how late a sleeping host thread wakes at most (the kernel's default timer slack).
    launch_ns: int = 8 * NS_PER_US
    notice_ns: int = 18 * NS_PER_US
    jitter_ns: int = 10 * NS_PER_US
    late_ns: int = 50 * NS_PER_US

    @property
    def switch_ns(self) -> int:
        """Return what one switch costs from the last useful work of one context to the first of the next."""
        return self.save_ns + self.gap_ns + self.restore_ns

    def turn_ns(self, timeslice_us: int) -> int:
        """Return the useful work in one turn of a TSG with this timeslice."""
        return max(0, timeslice_us * self.timeslice_us_ns - self.timeslice_short_ns)


H200 = Hardware()
