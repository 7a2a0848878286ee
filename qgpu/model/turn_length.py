"""Converts between a timeslice and the length of a turn on the engine, as measured.

Facts about the hardware only. ``qgpu.policies`` decides who gets which turns; ``qgpu.sched.trial`` reads what pods made
of them.
"""

from __future__ import annotations

from qgpu.model import MAX_TIMESLICE_US, MIN_TIMESLICE_US, NS_PER_US

#: Measured on an H200: timeslices of 5, 10, 20 ms gave turns of 5.20, 10.32, 20.56 ms. RM counts timeslices in units of
#: 1024 ns. The switches in and out (SWITCHED_NS) are charged to the TSG. Between two turns no TSG has the engine for
#: GAP_NS.
RM_US_NS = 1024
SWITCHED_NS = 82 * NS_PER_US
GAP_NS = 84 * NS_PER_US

#: The shortest sensible timeslice where TSGs of one pod preempt each other at every slice. With 50 µs a twelfth of the
#: card is left for work. With 200 µs nearly half is left, and online work waits 1.6 times as long: about the best ratio
#: of work to wait.
SEVERAL_US = 200


def turn_ns(slice_us: int) -> int:
    """Return how long, in ns, a TSG with this timeslice stays on the engine if it has work for all of it."""
    return slice_us * RM_US_NS + SWITCHED_NS


def slice_of_us(length_ns: float) -> int:
    """Return the timeslice in µs whose turn lasts ``length_ns``, within the bounds of a plan."""
    return min(MAX_TIMESLICE_US, max(MIN_TIMESLICE_US, int((length_ns - SWITCHED_NS) / RM_US_NS)))
