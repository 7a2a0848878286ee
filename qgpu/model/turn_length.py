"""What a turn on the engine lasts for a timeslice, as it was measured; and the timeslice for a turn.

Facts of the hardware alone. Who gets which turns is decided by ``qgpu.policies``, what pods made of them is told by
``qgpu.sched.pace``.
"""

from __future__ import annotations

from qgpu.model import MAX_TIMESLICE_US, MIN_TIMESLICE_US, NS_PER_US

#: Measured on an H200 (5, 10, 20 ms: 5.20, 10.32, 20.56 ms): RM counts timeslices in units of 1024 ns, and the
#: switches in and out are charged to the TSG; between two turns nobody has the engine for GAP_NS.
RM_US_NS = 1024
SWITCHED_NS = 82 * NS_PER_US
GAP_NS = 84 * NS_PER_US

#: The shortest sensible timeslice where TSGs of one pod cut each other at every slice: of 50 µs a twelfth of the card
#: is left. At 200 it is nearly half, and online work waits 1.6 times as long: of all slices about the most work for
#: the wait.
SEVERAL_US = 200


def turn_ns(slice_us: int) -> int:
    """Return for how long a TSG with this timeslice is on the engine, if it uses its turn up."""
    return slice_us * RM_US_NS + SWITCHED_NS


def slice_of_us(length_ns: float) -> int:
    """Return the timeslice whose turn lasts this long, within what a plan may ask for."""
    return min(MAX_TIMESLICE_US, max(MIN_TIMESLICE_US, int((length_ns - SWITCHED_NS) / RM_US_NS)))
