"""Arithmetic that policies have in common: dividing a whole by weights, as timeslices or as windows.

A pod's part of a round of the runlist is divided by its own busy TSGs, because the hardware gives every TSG
a turn: a pod of ten processes gets a pod's share, not ten. Nothing is ever divided by a number that another
pod can inflate. Timeslices are chosen by the turns that come of them: what a turn lasts beyond its slice is known.
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

#: The mean slice beside a satisfied pod, and beside one that starts: CUDA takes one short step after the other then,
#: and each would wait for whole turns.
SHORT_US = 2_000

#: About what the driver's own slice is.
PLAIN_NS = 2 * NS_PER_MS

#: The shortest timeslice worth its switch; below it switching eats the card.
SENSIBLE_US = 500

#: What is owed is paid back over this many periods. Quicker, and the delay of a period would make shares swing.
PAID_OVER = 4

#: Windows are corrected in steps of this, so that noise does not move gates.
STEP_NS = 100 * NS_PER_US

#: A pod that is owed time gets its window longer by this at most, in ns and as part of a period; one that owes
#: loses at most this part of its own window. So no debt starves anybody.
LONGER_NS = 1_500 * NS_PER_US
LONGER = 0.015
SHORTER = 0.25

#: For every so much work that a pod owes, its slice is shorter by this part, and by so much at most.
OWED_STEP_NS = 5 * NS_PER_MS
OWED_STEP = 0.1
OWED = 0.4

#: For as much that it is due its slice is longer by this part.
DUE_STEP = 0.2
DUE = 0.8

#: The slice of a pod whose steps fit into it is so many times longer: none is cut for want of a little.
ROOM = 1.5

#: Mean turn where pods take turns by gate, as part of the period for two pods, and the least: a gate costs up to a
#: millisecond.
TURN_PART, MOST_PART = 0.5, 0.75
SOUND_TURN_NS = 15 * NS_PER_MS
MIN_TURN_NS = 2 * NS_PER_MS

#: A period of turns by gate is so many times the operator's: a second then holds a whole number of the usual ones.
_TIMES = (1, 1.5, 2, 2.5, 5, 10)


def split(whole: int, weights: Sequence[int]) -> list[int]:
    """Divide ``whole`` by ``weights`` exactly: the parts add up to it (largest remainder, first come first).

    Weights of zero get nothing; without any weight everybody does.
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
    """Turn a pod's part of a round into the timeslice of each of its TSGs, within what a plan may ask for."""
    return hardware.slice_of_us(share_ns / pod.busy_tsgs)


def by_weights(snapshot: Snapshot, weights: Sequence[int], *, gates: bool = True) -> Plan:
    """Plan weights as the ledger found best: as timeslices, or as windows too where timeslices fail.

    With ``gates`` off no gate is closed, and no round is shorter than what the driver's own slices make of it. Pods
    that are satisfied have no window: a turn would be wasted on them. A pod busy alone has no gate moved.
    """
    parts, hardware = by_timeslices(snapshot, weights), traits(snapshot.card)
    busy = [pod.busy for pod in snapshot.pods]
    sharing = snapshot.offline if sum(busy) > 1 else Sharing()
    turns = [
        weight if works and not pod.satisfied else 0
        for pod, works, weight in zip(snapshot.pods, busy, weights, strict=True)
    ]
    if sharing.by_gate and not (gates and sum(turn > 0 for turn in turns) > 1):
        sharing = Sharing(round_ns=sum(busy) * PLAIN_NS)
    if not gates and sharing.round_ns is not None:
        longest = max(weight for weight, works in zip(weights, busy, strict=True) if works)
        least_ns = PLAIN_NS * sum(weight for weight, works in zip(weights, busy, strict=True) if works) // longest
        sharing = Sharing(round_ns=max(sharing.round_ns, least_ns))
    if starting := True in [pod.starting for pod in snapshot.pods]:
        parts = shortened(parts, SHORT_US, hardware)
    elif sharing.equal:
        parts = tuple(replace(part, timeslice_us=PLAIN_NS // NS_PER_US) for part in parts)
    elif sharing.round_ns is not None:
        pods = snapshot.pods if gates else tuple(replace(pod, debt_ns=0, fits_slice=False) for pod in snapshot.pods)
        parts = in_round(parts, pods, sharing.round_ns)
    if not sharing.by_gate:
        return Plan(snapshot.pgpu, snapshot.period_ns, parts, offline=None if starting else sharing)
    if 0 in [turn for turn, works in zip(turns, busy, strict=True) if works]:
        # Beside a satisfied pod there is only ever one of those who take turns, so it stands for all of them.
        beside = [sum(turns) if turn else weight for turn, weight in zip(turns, weights, strict=True)]
        slices = shortened(by_timeslices(replace(snapshot, period_ns=MAX_PERIOD_NS), beside), SHORT_US, hardware)
        parts = tuple(replace(part, weight=weight) for part, weight in zip(slices, weights, strict=True))
    period_ns = period_of_turns(snapshot.period_ns, [turn for turn in turns if turn])
    windows = in_turns(lengths(period_ns, turns, snapshot.pods), OnIdle.YIELD)
    parts = for_lending(parts, split(period_ns, turns), hardware)
    return Plan(
        snapshot.pgpu,
        period_ns,
        tuple(replace(part, windows=own or None) for part, own in zip(parts, windows, strict=True)),
        offline=sharing,
    )


def in_round(parts: Sequence[PodPlan], pods: Sequence[Pod], round_ns: int) -> tuple[PodPlan, ...]:
    """Shorten timeslices, in the same ratio, so that the turns of all busy pods last ``round_ns`` together.

    A pod that owes work has a still shorter one, in few steps: each change costs an RM call.
    """
    busy = [(part.timeslice_us, max(1, pod.busy_tsgs)) for part, pod in zip(parts, pods, strict=True) if pod.busy]
    whole_us, least_us = sum(us * tsgs for us, tsgs in busy), min((us for us, _ in busy), default=SENSIBLE_US)
    scale = min(1.0, max(round_ns / NS_PER_US / max(1, whole_us), SENSIBLE_US / least_us))
    return tuple(
        replace(part, timeslice_us=_bounded(part.timeslice_us * scale * _adjusted(pod)))
        for part, pod in zip(parts, pods, strict=True)
    )


def _bounded(slice_us: float) -> int:
    return min(MAX_TIMESLICE_US, max(MIN_TIMESLICE_US, round(slice_us)))


def _adjusted(pod: Pod) -> float:
    """Return by what a pod's slice is multiplied for the work it owes or is due, or so that it cuts no step."""
    if pod.fits_slice:
        return ROOM
    steps = int(pod.debt_ns / OWED_STEP_NS)
    return 1 - min(OWED, steps * OWED_STEP) if steps >= 0 else 1 + min(DUE, -steps * DUE_STEP)


def for_lending(parts: Sequence[PodPlan], lengths_ns: Sequence[int], hardware: HardwareTraits) -> tuple[PodPlan, ...]:
    """Shorten slices so that all of them fit into half of any window.

    Whose window was lent has to get a turn among all who were let in, or it would be taken for idle for ever.
    """
    shortest_us = min((length for length in lengths_ns if length), default=0) // NS_PER_US
    if not shortest_us:
        return tuple(parts)
    return shortened(parts, max(SENSIBLE_US, shortest_us // (2 * len(parts))), hardware)


def shortened(parts: Sequence[PodPlan], mean_us: int, hardware: HardwareTraits) -> tuple[PodPlan, ...]:
    """Take timeslices of this mean in place of long ones, in the same ratio.

    The mean grows where a slice would fall below the shortest sensible one, as lifting that slice alone would
    bend the ratio; it never grows beyond what it was.
    """
    turns = [hardware.turn_ns(part.timeslice_us) for part in parts]
    mean_ns, least_ns = hardware.turn_ns(mean_us), hardware.turn_ns(SENSIBLE_US)
    scale = min(1.0, max(mean_ns * len(turns) / sum(turns), least_ns / min(turns)))
    return tuple(
        replace(part, timeslice_us=hardware.slice_of_us(turn * scale)) for part, turn in zip(parts, turns, strict=True)
    )


def lengths(whole_ns: int, weights: Sequence[int], pods: Sequence[Pod]) -> list[int]:
    """Divide ``whole_ns`` into turns by weight, made up for what each pod owes or is owed. Weight 0: no turn."""
    turns = [
        max(min(MIN_TURN_NS, whole_ns // len(pods)), corrected(part, pod.debt_ns, whole_ns)) if weight else 0
        for part, weight, pod in zip(split(whole_ns, weights), weights, pods, strict=True)
    ]
    return split(whole_ns, turns)


def corrected(length_ns: int, debt_ns: int, period_ns: int) -> int:
    """Return a pod's window with a part of its debt paid: integral feedback, as debt is the sum of all misses."""
    change_ns = -(debt_ns // (PAID_OVER * STEP_NS)) * STEP_NS
    longest_ns = length_ns + max(LONGER_NS, round(LONGER * period_ns))
    return min(longest_ns, max(length_ns - round(SHORTER * length_ns), length_ns + change_ns))


def period_of_turns(period_ns: int, weights: Sequence[int], mean_ns: int | None = None) -> int:
    """Choose a period that leaves turns long enough for what moving gates costs, and this long on average.

    Without ``mean_ns`` the operator's period bounds turns: they are half of it on average, or somewhat more where it is
    so short that gates would cost a tenth of it.
    """
    if mean_ns is None:
        mean_ns = max(round(TURN_PART * period_ns), min(SOUND_TURN_NS, round(MOST_PART * period_ns)))
    wanted_ns = max(len(weights) * mean_ns, MIN_TURN_NS * sum(weights) // min(weights))
    fitting = (round(times * period_ns) for times in _TIMES if times * period_ns >= wanted_ns)
    return min(MAX_PERIOD_NS, next(fitting, max(round(_TIMES[-1] * period_ns), wanted_ns)))


def by_timeslices(snapshot: Snapshot, weights: Sequence[int]) -> tuple[PodPlan, ...]:
    """Plan weights as hardware timeslices whose turns add up to the period; every gate stays open.

    The ratio of the turns is the ratio of compute among the pods that are busy, and an idle pod costs nothing, so
    idle capacity is lent and taken back by the hardware itself. A round of the pods that are on the GPU lasts the
    period, so that a second holds a whole number of rounds and shares are exact in any second. Where the period is
    longer than the longest timeslice a round lasts that instead: cutting one of them off would bend the ratio.
    """
    shapes = tuple([(pod.name, pod.grant.pod_class, len(pod.tsgs) and pod.busy_tsgs) for pod in snapshot.pods])
    return _slices(shapes, tuple(weights), snapshot.period_ns, traits(snapshot.card))


@lru_cache(maxsize=256)
def _slices(
    shapes: Sequence[tuple[str, PodClass, int]], weights: Sequence[int], period_ns: int, hardware: HardwareTraits
) -> tuple[PodPlan, ...]:
    """Plan slices for pods given as name, class and turns in a round (0: not on the GPU); every tick asks the same."""
    here = [weight for (_, _, turns), weight in zip(shapes, weights, strict=True) if turns] or weights
    round_ns = min(period_ns, MAX_TIMESLICE_US * NS_PER_US) - hardware.gap_ns * sum(turns for _, _, turns in shapes)
    parts = split(max(0, round_ns) * sum(weights) // max(1, sum(here)), weights)
    return tuple(
        PodPlan(name, pod_class, hardware.slice_of_us(part / max(1, turns)), weight=weight)
        for (name, pod_class, turns), part, weight in zip(shapes, parts, weights, strict=True)
    )


def in_turns(lengths_ns: Sequence[int], on_idle: OnIdle, at: int = 0) -> list[tuple[Window, ...]]:
    """Lay windows of these lengths one after the other from ``at`` in the period; length 0 means no window."""
    windows: list[tuple[Window, ...]] = []
    for length in lengths_ns:
        windows.append((Window(at, at + length, on_idle),) if length > 0 else ())
        at += length
    return windows
