"""What was measured of each model of card: how long a turn lasts for a timeslice, and what a switch costs.

``python bench/hardware_traits.py`` measures a row on the card at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from qgpu.model import MAX_TIMESLICE_US, MIN_TIMESLICE_US, NS_PER_US


@dataclass(frozen=True, slots=True)
class HardwareTraits:
    """What was measured of one model of card."""

    #: A word of the name that NVML reports; empty for other cards.
    model: str
    #: How long 1 µs of a timeslice lasts, in ns.
    timeslice_us_ns: int
    #: The switches in and out, which are charged to the TSG beyond its slice; and the gap between two turns, in which
    #: no TSG has the engine.
    switched_ns: int
    gap_ns: int
    #: (slice, p99) in µs of 100 µs of online work every 10 ms over a flood of 1 ms kernels; and without the flood.
    p99_us: tuple[tuple[int, int], ...]
    alone_p99_us: int
    #: False where the table of latencies is another card's.
    p99_measured: bool = True

    def turn_ns(self, slice_us: int) -> int:
        """Return for how long a TSG with this timeslice is on the engine, if it uses its turn up."""
        return slice_us * self.timeslice_us_ns + self.switched_ns

    def slice_of_us(self, length_ns: float) -> int:
        """Return the timeslice whose turn lasts this long, within what a plan may ask for."""
        within_us = int((length_ns - self.switched_ns) / self.timeslice_us_ns)
        return min(MAX_TIMESLICE_US, max(MIN_TIMESLICE_US, within_us))


#: Turns of 5, 10, 20 ms last 5.20, 10.32, 20.56 ms: RM counts timeslices in units of 1024 ns.
H200 = HardwareTraits(
    "H200",
    timeslice_us_ns=1024,
    switched_ns=82 * NS_PER_US,
    gap_ns=84 * NS_PER_US,
    p99_us=((50, 393), (100, 429), (200, 533), (500, 824), (1000, 1313)),
    alone_p99_us=137,
)

#: Turns of 1 and 2 ms last 1.12 and 2.15 ms. Latencies by slices were not measured: they are the H200's.
H100 = replace(H200, model="H100", switched_ns=96 * NS_PER_US, p99_measured=False)

#: Any other card takes the H200's numbers.
OTHER = replace(H200, model="", p99_measured=False)

ROWS = (H200, H100)


@lru_cache(maxsize=64)
def traits(card: str) -> HardwareTraits:
    """Return the row of a card by the name that NVML reports, "NVIDIA H100 80GB HBM3" for example.

    No MIG instance was measured, whatever its card.
    """
    words = card.split()
    return next((row for row in ROWS if row.model in words and "MIG" not in words), OTHER)


#: The shortest useful timeslice, in µs, where TSGs of one pod preempt each other at every slice. With 50 µs a twelfth
#: of the card does work; with 200 nearly half does, and online work waits 1.6 times as long.
MIN_PARALLEL_TIMESLICE_US = 200
