"""Arithmetic that all policies share: divide GPU time by weights, as timeslices or as windows.

A pod's part of a round of the runlist is divided among its own busy TSGs, because the hardware gives every TSG a turn.
So a pod with ten processes gets the share of one pod. No divisor depends on a number that another pod can inflate. A
turn lasts longer than its timeslice by a known amount; timeslices are chosen so that the turns have the right ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from qgpu.model import (
    MAX_PERIOD_NS,
    MAX_TIMESLICE_US,
    MIN_TIMESLICE_US,
    NS_PER_MS,
    NS_PER_US,
    OnIdle,
    Plan,
    Pod,
    PodClass,
    PodPlan,
    Sharing,
    Snapshot,
    Window,
)
from qgpu.model.hardware_traits import HardwareTraits, traits

#: The mean slice beside a satisfied pod, and beside a pod that starts. A CUDA program starts in many short steps, and
#: each of them would wait for whole turns.
SHORT_SLICE_US = 2_000

#: About the length of the driver's own timeslice.
DRIVER_SLICE_NS = 2 * NS_PER_MS

#: The shortest timeslice worth its switch; below it, switching takes too much of the card.
MIN_WORTHWHILE_US = 500

#: A debt is repaid over this many periods. A quicker repayment would make shares oscillate, because samples are a
#: period late.
REPAYMENT_PERIODS = 4

#: Windows are corrected in steps of this length, so that noise does not move gates.
STEP_NS = 100 * NS_PER_US

#: Bounds of the correction, so that no debt starves a pod. The window of a pod that is owed time grows by at most
#: MAX_LONGER_NS or this part of the period, whichever is more. The window of a pod in debt shrinks by at most this part
#: of its length.
MAX_LONGER_NS = 3 * NS_PER_MS
MAX_LONGER = 0.03
MAX_SHORTER = 0.25

#: For every OWED_STEP_NS of work that a pod owes, its slice is shorter by OWED_STEP, and by MAX_OWED_CUT at most.
OWED_STEP_NS = 5 * NS_PER_MS
OWED_STEP = 0.1
MAX_OWED_CUT = 0.4

#: For every OWED_STEP_NS of work that a pod is due, its slice is longer by DUE_STEP, and by MAX_DUE_GAIN at most.
DUE_STEP = 0.2
MAX_DUE_GAIN = 0.8

#: Factor for the slice of a pod whose steps fit into its slice, so that a slightly longer step is not cut.
STEP_MARGIN = 1.5

#: Mean turn where two pods take turns by gate: TURN_PART of the period, or CHEAP_TURN_NS if that is longer, but at most
#: MOST_PART of the period. Moving a gate costs up to a millisecond. No turn is shorter than MIN_TURN_NS.
TURN_PART, MOST_PART = 0.5, 0.75
CHEAP_TURN_NS = 15 * NS_PER_MS
MIN_TURN_NS = 2 * NS_PER_MS

#: The period is so long that turns have the ratio of weights. But a pod with less than one part in this many of the
#: card may get that much instead: for its token turn alone others would wait for seconds.
_TOKEN_PARTS = 200

#: Reserved time is a whole number of parts of the period, of which it has this many.
_RESERVED_PARTS = 100

#: A period of turns by gate is one of these multiples of the operator's period, so that a second holds a whole number
#: of the usual periods.
_TIMES = (1, 1.5, 2, 2.5, 5, 10)


def split(whole: int, weights: Sequence[int]) -> list[int]:
    """Divide ``whole`` by ``weights`` exactly: the parts add up to it (largest remainder; ties go to the first).

    A weight of zero gets nothing. If all weights are zero, all parts are zero.
    """
    total = sum(weights)
    if total <= 0:
        return [0 for _ in weights]
    parts = [whole * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(whole * weights[i] % total), i))
    for i in by_remainder[: whole - sum(parts)]:
        parts[i] += 1
    return parts


def timeslice_us(share_ns: int, pod: Pod, hardware: HardwareTraits) -> int:
    """Turn a pod's part of a round into the timeslice of each of its TSGs, within the bounds of a plan."""
    return hardware.slice_of_us(share_ns / pod.busy_tsgs)


def by_weights(snapshot: Snapshot, weights: Sequence[int], *, gates: bool = True) -> Plan:
    """Plan weights in the way the ledger settled on: as timeslices, or with windows too where timeslices fail.

    With ``gates`` off no gate closes, and no round is shorter than the one that the driver's own slices make. Satisfied
    and ungated pods have no window, because they would waste it. If only one pod is busy, no gate moves. While a pod
    starts, no time is reserved.
    """
    parts, hardware = by_timeslices(snapshot, weights), traits(snapshot.card)
    busy = [pod.busy for pod in snapshot.pods]
    sharing = snapshot.offline if sum(busy) > 1 else Sharing()
    turns = [
        weight if works and not pod.satisfied and pod.name not in sharing.ungated else 0
        for pod, works, weight in zip(snapshot.pods, busy, weights, strict=True)
    ]
    drivers_ns = DRIVER_SLICE_NS * sum([pod.busy_tsgs for pod in snapshot.pods if pod.busy])
    if sharing.by_gate and not (gates and sum(turn > 0 for turn in turns) > (0 if sharing.reserved else 1)):
        sharing = Sharing(round_ns=drivers_ns)
    if not gates and sharing.round_ns is not None:
        sharing = Sharing(round_ns=max(sharing.round_ns, drivers_ns))
    if not gates and sharing.slice_factors:
        sharing = replace(sharing, slice_factors=())
    if starting := True in [pod.starting for pod in snapshot.pods]:
        parts = shortened(parts, SHORT_SLICE_US, hardware)
    elif sharing.equal:
        parts = tuple(replace(part, timeslice_us=DRIVER_SLICE_NS // NS_PER_US) for part in parts)
    elif sharing.round_ns is not None:
        pods = snapshot.pods if gates else tuple([pod._replace(debt_ns=0, fits_slice=False) for pod in snapshot.pods])
        parts = in_round(parts, pods, sharing.round_ns)
    if not sharing.by_gate or sharing.reserved:
        parts, period_ns = with_factors(parts, sharing), snapshot.period_ns
        if sharing.reserved and not starting:
            period_ns, shared = _outside_reserved(period_ns, sharing.reserved)
            parts = tuple(
                [replace(part, windows=shared if turn else None) for part, turn in zip(parts, turns, strict=True)]
            )
        return Plan(snapshot.pgpu, period_ns, parts, offline=None if starting else sharing)
    if 0 in [turn for turn, works in zip(turns, busy, strict=True) if works]:
        # A pod without a window competes with only one of the pods that take turns at a time, so that pod stands for
        # all of them.
        beside = [sum(turns) if turn else weight for turn, weight in zip(turns, weights, strict=True)]
        slices = shortened(by_timeslices(replace(snapshot, period_ns=MAX_PERIOD_NS), beside), SHORT_SLICE_US, hardware)
        parts = tuple(replace(part, weight=weight) for part, weight in zip(slices, weights, strict=True))
    period_ns = period_of_turns(snapshot.period_ns, [turn for turn in turns if turn])
    windows = consecutive_windows(lengths(period_ns, turns, snapshot.pods), OnIdle.YIELD)
    parts = slices_within_windows(parts, split(period_ns, turns), hardware)
    return Plan(
        snapshot.pgpu,
        period_ns,
        tuple(replace(part, windows=own or None) for part, own in zip(parts, windows, strict=True)),
        offline=sharing,
    )


def _outside_reserved(period_ns: int, reserved: float) -> tuple[int, tuple[Window, ...]]:
    """Return a period long enough to move gates in, and the window of pods that nothing of it is reserved for."""
    period_ns = period_of_turns(period_ns, [_RESERVED_PARTS - (parts := round(reserved * _RESERVED_PARTS)), parts])
    return period_ns, (Window(0, period_ns - period_ns * parts // _RESERVED_PARTS, OnIdle.YIELD),)


def in_round(parts: Sequence[PodPlan], pods: Sequence[Pod], round_ns: int) -> tuple[PodPlan, ...]:
    """Shorten timeslices in the same ratio, so that the turns of all busy pods together last ``round_ns``.

    A pod that owes work gets a still shorter slice, in a few steps, because each change costs an RM call.
    """
    busy = [(part.timeslice_us, max(1, pod.busy_tsgs)) for part, pod in zip(parts, pods, strict=True) if pod.busy]
    whole_us, least_us = sum(us * tsgs for us, tsgs in busy), min((us for us, _ in busy), default=MIN_WORTHWHILE_US)
    scale = min(1.0, max(round_ns / NS_PER_US / max(1, whole_us), MIN_WORTHWHILE_US / least_us))
    return tuple(
        replace(part, timeslice_us=_bounded(part.timeslice_us * scale * _slice_factor(pod)))
        for part, pod in zip(parts, pods, strict=True)
    )


def with_factors(parts: tuple[PodPlan, ...], sharing: Sharing) -> tuple[PodPlan, ...]:
    """Shorten the slices of the pods that have a factor."""
    if not sharing.slice_factors:
        return parts
    factors = dict(sharing.slice_factors)
    return tuple(
        replace(part, timeslice_us=_bounded(part.timeslice_us * factors[part.pod])) if part.pod in factors else part
        for part in parts
    )


def _bounded(slice_us: float) -> int:
    return min(MAX_TIMESLICE_US, max(MIN_TIMESLICE_US, round(slice_us)))


def _slice_factor(pod: Pod) -> float:
    """Return the factor for a pod's slice: for the work it owes or is due, or so that the slice cuts no step."""
    if pod.fits_slice:
        return STEP_MARGIN
    steps = int(pod.debt_ns / OWED_STEP_NS)
    return 1 - min(MAX_OWED_CUT, steps * OWED_STEP) if steps >= 0 else 1 + min(MAX_DUE_GAIN, -steps * DUE_STEP)


def slices_within_windows(
    parts: Sequence[PodPlan], lengths_ns: Sequence[int], hardware: HardwareTraits
) -> tuple[PodPlan, ...]:
    """Shorten slices so that one slice of every pod fits into half of the shortest window.

    If a pod's window is lent, the pod must get a turn among the pods that run in it. Otherwise it would count as idle
    forever.
    """
    shortest_us = min((length for length in lengths_ns if length), default=0) // NS_PER_US
    if not shortest_us:
        return tuple(parts)
    return shortened(parts, max(MIN_WORTHWHILE_US, shortest_us // (2 * len(parts))), hardware)


def shortened(parts: Sequence[PodPlan], mean_us: int, hardware: HardwareTraits) -> tuple[PodPlan, ...]:
    """Shorten timeslices to this mean, in the same ratio.

    The mean is larger where a slice would fall below the shortest sensible one, because lifting that slice alone would
    change the ratio. It never exceeds the original mean.
    """
    turns = [hardware.turn_ns(part.timeslice_us) for part in parts]
    mean_ns, least_ns = hardware.turn_ns(mean_us), hardware.turn_ns(MIN_WORTHWHILE_US)
    scale = min(1.0, max(mean_ns * len(turns) / sum(turns), least_ns / min(turns)))
    return tuple(
        replace(part, timeslice_us=hardware.slice_of_us(turn * scale)) for part, turn in zip(parts, turns, strict=True)
    )


def lengths(whole_ns: int, weights: Sequence[int], pods: Sequence[Pod]) -> list[int]:
    """Divide ``whole_ns`` into turns by weight, corrected for what each pod owes or is owed. Weight 0 gets no turn."""
    turns = [
        max(min(MIN_TURN_NS, whole_ns // len(pods)), debt_corrected(part, pod.debt_ns, whole_ns)) if weight else 0
        for part, weight, pod in zip(split(whole_ns, weights), weights, pods, strict=True)
    ]
    return split(whole_ns, turns)


def shortened_to(whole_ns: int, lengths_ns: Sequence[int], nominal_ns: Sequence[int]) -> list[int]:
    """Shorten windows that add up to more than ``whole_ns``, in proportion to what they have beyond half of nominal.

    Half of the nominal lengths fits into ``whole_ns``.
    """
    if sum(lengths_ns) <= whole_ns:
        return list(lengths_ns)
    halves = [min(length, nominal // 2) for length, nominal in zip(lengths_ns, nominal_ns, strict=True)]
    beyond = [length - half for length, half in zip(lengths_ns, halves, strict=True)]
    return [half + more for half, more in zip(halves, split(whole_ns - sum(halves), beyond), strict=True)]


def debt_corrected(length_ns: int, debt_ns: int, period_ns: int) -> int:
    """Return a window's length, corrected for a part of the pod's debt.

    This is integral control, because debt is the sum of all errors.
    """
    change_ns = -(debt_ns // (REPAYMENT_PERIODS * STEP_NS)) * STEP_NS
    longest_ns = length_ns + max(MAX_LONGER_NS, round(MAX_LONGER * period_ns))
    return min(longest_ns, max(length_ns - round(MAX_SHORTER * length_ns), length_ns + change_ns))


def period_of_turns(period_ns: int, weights: Sequence[int], mean_ns: int | None = None) -> int:
    """Choose a period whose turns are long enough for the cost of moving gates, and ``mean_ns`` long on average.

    Without ``mean_ns`` the operator's period bounds turns: a turn is half of it on average, or somewhat more if the
    period is so short that gates would cost a tenth of it.
    """
    if mean_ns is None:
        mean_ns = max(round(TURN_PART * period_ns), min(CHEAP_TURN_NS, round(MOST_PART * period_ns)))
    tokens = sum([weight * _TOKEN_PARTS < sum(weights) for weight in weights])
    exact_ns = MIN_TURN_NS * sum(weights) // min(weights)
    wanted_ns = max(len(weights) * mean_ns, min(exact_ns, MIN_TURN_NS * _TOKEN_PARTS * max(1, tokens)))
    fitting = (round(times * period_ns) for times in _TIMES if times * period_ns >= wanted_ns)
    return min(MAX_PERIOD_NS, next(fitting, max(round(_TIMES[-1] * period_ns), wanted_ns)))


def by_timeslices(snapshot: Snapshot, weights: Sequence[int]) -> tuple[PodPlan, ...]:
    """Plan weights as hardware timeslices whose turns add up to the period; every gate stays open.

    The ratio of turns is the ratio of compute among busy pods. An idle pod takes no time, so the hardware itself lends
    idle capacity and takes it back. A round of the pods on the GPU lasts one period, so a second holds a whole number
    of rounds and shares are exact in any second. If the period is longer than the longest timeslice, a round lasts that
    long instead: capping a single slice would change the ratio.
    """
    shapes = tuple([(pod.name, pod.grant.pod_class, len(pod.tsgs) and pod.busy_tsgs) for pod in snapshot.pods])
    return _slices(shapes, tuple(weights), snapshot.period_ns, traits(snapshot.card))


@lru_cache(maxsize=256)
def _slices(
    shapes: Sequence[tuple[str, PodClass, int]], weights: Sequence[int], period_ns: int, hardware: HardwareTraits
) -> tuple[PodPlan, ...]:
    """Plan slices for pods given as name, class and turns in a round (0: not on the GPU). Every tick asks: cached."""
    here = [weight for (_, _, turns), weight in zip(shapes, weights, strict=True) if turns] or weights
    round_ns = min(period_ns, MAX_TIMESLICE_US * NS_PER_US) - hardware.gap_ns * sum(turns for _, _, turns in shapes)
    parts = split(max(0, round_ns) * sum(weights) // max(1, sum(here)), weights)
    return tuple(
        PodPlan(name, pod_class, hardware.slice_of_us(part / max(1, turns)), weight=weight)
        for (name, pod_class, turns), part, weight in zip(shapes, parts, weights, strict=True)
    )


def consecutive_windows(lengths_ns: Sequence[int], on_idle: OnIdle, at: int = 0) -> list[tuple[Window, ...]]:
    """Lay windows of these lengths one after the other, from ``at`` in the period; length 0 means no window."""
    windows: list[tuple[Window, ...]] = []
    for length in lengths_ns:
        windows.append((Window(at, at + length, on_idle),) if length > 0 else ())
        at += length
    return windows
