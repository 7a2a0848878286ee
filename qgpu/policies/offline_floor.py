"""The offline floor: GPU time that offline pods get together even if online work is unending.

Steered by measured time. What they came short of the floor makes the slices of online pods shorter, in proportion;
while nothing is short, online work is not cut. How long slices are besides is left to ``qgpu.policies.online_first``.
"""

from __future__ import annotations

from qgpu.model import FLOOR_SPAN_NS, FLOOR_TIMES, Snapshot

#: Beside a floor online TSGs run no longer than this at a stretch: else nobody could tell that offline pods wait.
#: An odd number, so that the windows of such pods are not missed period after period.
GLIMPSE_US = 37_000

#: A round of offline work in which a floor is paid: so long that switching to and fro takes a fiftieth of the round.
PAID_US = 2_000

#: Parts are told apart by this much, so that slices are not set anew for nothing; and less is not worth a switch.
_STEP = 0.005
_LEAST = 0.01
_MOST = 0.9


def part(snapshot: Snapshot) -> float:
    """Return the part of the GPU that offline pods are to have now; 0 where nothing is owed.

    In proportion to what they are short of, which makes it an integral control: unending online work leaves them
    short by so much that this part is the floor. It is larger where offline pods have windows besides, which keep them
    off the GPU for part of the time: up to eight times the floor, and never all.
    """
    if not snapshot.offline_floor or snapshot.offline_short_ns <= 0:
        return 0.0
    wanted = snapshot.offline_short_ns / FLOOR_SPAN_NS
    steps = min(FLOOR_TIMES * snapshot.offline_floor / 100, _MOST, wanted) // _STEP
    return steps * _STEP if steps * _STEP >= _LEAST else 0.0


def online_round_us(snapshot: Snapshot) -> int | None:
    """Return how long online TSGs may run together between two turns of offline pods; None for as long as they like."""
    if not snapshot.offline_floor:
        return None
    owed = part(snapshot)
    return min(GLIMPSE_US, round(PAID_US * (1 - owed) / owed)) if owed else GLIMPSE_US


def offline_round_us(snapshot: Snapshot, online_us: int) -> int:
    """Return how long offline TSGs are to run together after ``online_us`` of online work; 0 where nothing is owed."""
    owed = part(snapshot)
    return round(online_us * owed / (1 - owed)) if owed else 0
