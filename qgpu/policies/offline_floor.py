"""The offline floor: GPU time that all offline pods together get even under endless online work.

The control input is measured time. The amount by which offline pods are short of the floor shortens the slices of
online pods in proportion; while they are not short, online work is not cut. ``qgpu.policies.online_first`` chooses the
slices otherwise.
"""

from __future__ import annotations

from qgpu.model import FLOOR_SPAN_NS, FLOOR_TIMES, Snapshot

#: With a floor, online TSGs run no longer than this at a stretch. Otherwise the daemon could not see that offline pods
#: wait. The number is odd, so that the stretch does not cover the same windows of offline pods in every period.
MAX_ONLINE_ROUND_US = 37_000

#: Length of the offline round that pays the floor: long enough that switching takes a fiftieth of the round.
PAYING_ROUND_US = 2_000

#: Parts are rounded to this step, so that slices are not set anew for noise. A part below _LEAST is not worth a switch.
_STEP = 0.005
_LEAST = 0.01
_MOST = 0.9


def part(snapshot: Snapshot) -> float:
    """Return the part of the GPU that offline pods are due now; 0 if they are not short.

    The part is proportional to what they are short of, which makes this an integral controller: under endless online
    work the shortage settles where this part equals the floor. The part is larger if offline pods also have windows,
    which keep them off the GPU for part of the time: up to eight times the floor, and never the whole GPU.
    """
    if not snapshot.offline_floor or snapshot.offline_short_ns <= 0:
        return 0.0
    wanted = snapshot.offline_short_ns / FLOOR_SPAN_NS
    steps = min(FLOOR_TIMES * snapshot.offline_floor / 100, _MOST, wanted) // _STEP
    return steps * _STEP if steps * _STEP >= _LEAST else 0.0


def online_round_us(snapshot: Snapshot) -> int | None:
    """Return how long online TSGs may run together between two turns of offline pods; None if there is no limit."""
    if not snapshot.offline_floor:
        return None
    owed = part(snapshot)
    return min(MAX_ONLINE_ROUND_US, round(PAYING_ROUND_US * (1 - owed) / owed)) if owed else MAX_ONLINE_ROUND_US


def offline_round_us(snapshot: Snapshot, online_us: int) -> int:
    """Return how long offline TSGs run together after ``online_us`` of online work; 0 if they are not short."""
    owed = part(snapshot)
    return round(online_us * owed / (1 - owed)) if owed else 0
