"""Latency targets: the longest offline slice that an online pod's target allows.

A target is what sharing may add to the 99th percentile of an online pod's latency. This file reads one measured table
of the card, slice against added latency, in both directions. Without a target, slices are as short as is sensible.
``qgpu.policies.online_first`` decides which slices to shorten.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from qgpu.model import MAX_TIMESLICE_US, MIN_TIMESLICE_US, NS_PER_US, Pod
from qgpu.model.hardware_traits import HardwareTraits

#: In the measured table requests arrive at any moment of a slice. Requests that always arrive right when a slice begins
#: wait for the whole slice and for the switch: this much longer than the table says (simulated).
IN_PHASE_US = 80

#: Slice of an offline TSG beside an online pod without a target: the shortest slice at which a lone TSG still runs
#: freely.
LONE_US = MIN_TIMESLICE_US

#: The same beside an online pod without a target whose work is fragmented: each pause between its kernels lets offline
#: work in and costs two switches. Measured on an H200, a decoder launched from Python beside a training (p99 of a
#: request of 16 tokens, the training's speed): 50 µs 73 ms and 0.64, 200 µs 80 and 0.69, 500 µs 79 and 0.79, 1 ms 87
#: and 0.82; alone 77 ms.
FRAGMENTED_US = 500


def tightest_ns(pods: Iterable[Pod]) -> int | None:
    """Return the tightest target of these pods; None if one has none, because it wants the least possible latency."""
    targets = [pod.grant.latency_target_ns for pod in pods]
    return None if None in targets else min((target for target in targets if target is not None), default=None)


def allowed_us(pods: Iterable[Pod], waits: int, hardware: HardwareTraits) -> int:
    """Return the longest slice in µs that all these online pods allow to the ``waits`` TSGs they may wait for.

    Pods without a target allow a longer slice if one of them has fragmented work.
    """
    asked = {(pod.grant.latency_target_ns, pod.fragmented) for pod in pods}
    lenient = FRAGMENTED_US if (None, True) in asked else LONE_US
    return min(lenient if target is None else slice_us(target, waits, hardware) for target, _ in asked)


def slice_us(target_ns: int, waits: int, hardware: HardwareTraits) -> int:
    """Return the longest slice in µs for which waiting for ``waits`` TSGs, one slice each, stays within the target.

    The table is interpolated linearly. Beyond its end, a slice adds its own length. Several TSGs add up: four of 50 µs
    were measured to add 1025 µs, four times what one adds.
    """
    added_us = (target_ns / NS_PER_US - IN_PHASE_US) / max(1, waits)
    table = [(slice_us, p99_us - hardware.alone_p99_us) for slice_us, p99_us in hardware.p99_us]
    for (slice_a, added_a), (slice_b, added_b) in pairwise(table):
        if added_us < added_b:
            allowed = slice_a + (added_us - added_a) * (slice_b - slice_a) / (added_b - added_a)
            return max(MIN_TIMESLICE_US, int(allowed))
    last_us, last_added_us = table[-1]
    return min(MAX_TIMESLICE_US, int(last_us + (added_us - last_added_us) * NS_PER_US / hardware.timeslice_us_ns))


def added_ns(slice_us: int, hardware: HardwareTraits) -> int:
    """Return what waiting for one TSG with this slice adds to the p99 of work that arrives at any moment, in ns.

    The table of ``slice_us``, read the other way.
    """
    table = [(each_us, p99_us - hardware.alone_p99_us) for each_us, p99_us in hardware.p99_us]
    for (slice_a, added_a), (slice_b, added_b) in pairwise(table):
        if slice_us < slice_b:
            return round(
                max(0.0, added_a + (slice_us - slice_a) * (added_b - added_a) / (slice_b - slice_a)) * NS_PER_US
            )
    last_us, last_added_us = table[-1]
    return last_added_us * NS_PER_US + (slice_us - last_us) * hardware.timeslice_us_ns
