"""What latency targets allow: how long the slices may be that online work has to wait for.

A target is what sharing may add to the 99th percentile of an online pod's latency. The rule is one measured
table of the card, read backwards. Without a target slices are as short as is sensible. Which are shortened is left to
``qgpu.policies.online_first``.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from qgpu.model import MAX_TIMESLICE_US, MIN_TIMESLICE_US, NS_PER_US, Pod
from qgpu.model.hardware_traits import HardwareTraits

#: The requests of the measured table came at any moment of a slice. Ones that come back right when a slice begins wait
#: for all of it, and the switch to boot: this much longer than the table says (simulated).
IN_STEP_US = 80

#: What an offline TSG gets beside an online pod without a target: the shortest at which a lone TSG still runs freely.
LONE_US = MIN_TIMESLICE_US

#: The same beside an online pod whose kernels come one by one, without a target: each of its pauses lets offline work
#: in and costs two switches. Measured on an H200, a decoder launched from Python beside a training (p99 of a request of
#: 16 tokens, the training's speed): 50 µs 73 ms and 0.64, 200 µs 80 and 0.69, 500 µs 79 and 0.79, 1 ms 87 and 0.82;
#: alone 77 ms.
FRAGMENTED_US = 500


def tightest_ns(pods: Iterable[Pod]) -> int | None:
    """Return the tightest target of these pods; None where one has none, for it wants the least there is."""
    targets = [pod.grant.latency_target_ns for pod in pods]
    return None if None in targets else min((target for target in targets if target is not None), default=None)


def allowed_us(pods: Iterable[Pod], waits: int, hardware: HardwareTraits) -> int:
    """Return the longest slice in µs that all these online pods allow TSGs they wait for, so many at once.

    Pods without a target allow a longer one where the work of such a pod is fragmented.
    """
    asked = {(pod.grant.latency_target_ns, pod.fragmented) for pod in pods}
    lenient = FRAGMENTED_US if (None, True) in asked else LONE_US
    return min(lenient if target is None else slice_us(target, waits, hardware) for target, _ in asked)


def slice_us(target_ns: int, waits: int, hardware: HardwareTraits) -> int:
    """Return the longest slice in µs, so that waiting for ``waits`` TSGs that have it each stays within the target.

    In between the table is read straight, beyond its end a slice adds what it lasts. Several TSGs add up: four of
    50 µs were measured to add 1025 µs, four times what one adds.
    """
    added_us = (target_ns / NS_PER_US - IN_STEP_US) / max(1, waits)
    table = [(slice_us, p99_us - hardware.alone_p99_us) for slice_us, p99_us in hardware.p99_us]
    for (slice_a, added_a), (slice_b, added_b) in pairwise(table):
        if added_us < added_b:
            allowed = slice_a + (added_us - added_a) * (slice_b - slice_a) / (added_b - added_a)
            return max(MIN_TIMESLICE_US, int(allowed))
    last_us, last_added_us = table[-1]
    return min(MAX_TIMESLICE_US, int(last_us + (added_us - last_added_us) * NS_PER_US / hardware.timeslice_us_ns))
