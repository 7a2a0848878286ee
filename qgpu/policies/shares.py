"""Arithmetic that policies have in common: dividing a whole by weights. It knows nothing of GPUs or time.

A pod's part of a round of the runlist is divided by its own busy TSGs, because the hardware gives every TSG
a turn: a pod of ten processes gets a pod's share, not ten. Nothing is ever divided by a number that another
pod can inflate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qgpu.model import (
    MAX_TIMESLICE_US,
    MIN_TIMESLICE_US,
    NS_PER_MS,
    NS_PER_US,
    OnIdle,
    Plan,
    Pod,
    PodPlan,
    Snapshot,
    Window,
)

#: What is owed is paid back over this many periods. Quicker, and the delay of a period would make shares swing.
PAID_OVER = 4

#: Windows are corrected in steps of this, so that noise does not move gates.
STEP_NS = 100 * NS_PER_US

#: A pod that is owed time gets its window longer by this at most, in ns and as part of a period; one that owes
#: loses at most this part of its own window. So no debt starves anybody.
LONGER_NS = 1_500 * NS_PER_US
LONGER = 0.015
SHORTER = 0.25

#: Mean and least turn where pods take turns by gate: a gate costs up to a millisecond.
TURN_NS = 50 * NS_PER_MS
MIN_TURN_NS = 2 * NS_PER_MS

#: Periods of turns by gate: a second holds a whole number of them, so shares are exact in any second.
_PERIODS_NS = tuple(ms * NS_PER_MS for ms in (100, 200, 250, 500, 1000))


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


def timeslice_us(share_ns: int, pod: Pod) -> int:
    """Turn a pod's part of a round into the timeslice of each of its TSGs, within what a plan may ask for."""
    return min(MAX_TIMESLICE_US, max(MIN_TIMESLICE_US, share_ns // pod.busy_tsgs // NS_PER_US))


def by_weights(snapshot: Snapshot, weights: Sequence[int]) -> Plan:
    """Plan weights as timeslices; or, where busy pods are there that timeslices don't bind, as windows too.

    Windows are those of the busy pods, one after the other, over the whole period; the rest stay ungated. What
    the ledger says was missed is made up for. A pod busy alone has no gate moved.
    """
    parts = by_timeslices(snapshot, weights)
    busy = [weight if pod.busy else 0 for pod, weight in zip(snapshot.pods, weights, strict=True)]
    if sum(pod.busy for pod in snapshot.pods) < 2 or not any(pod.busy and pod.unbound for pod in snapshot.pods):
        return Plan(snapshot.pgpu, snapshot.period_ns, parts)
    period_ns = _period_of_turns(snapshot.period_ns, [weight for weight in busy if weight])
    windows = in_turns(lengths(period_ns, busy, snapshot.pods), OnIdle.YIELD)
    return Plan(
        snapshot.pgpu,
        period_ns,
        tuple(
            replace(part, windows=own if pod.busy else None)
            for part, pod, own in zip(parts, snapshot.pods, windows, strict=True)
        ),
    )


def lengths(whole_ns: int, weights: Sequence[int], pods: Sequence[Pod]) -> list[int]:
    """Divide ``whole_ns`` into turns by weight, made up for what each pod owes or is owed. Weight 0: no turn."""
    turns = [
        max(min(MIN_TURN_NS, whole_ns // len(pods)), corrected(part, pod, whole_ns)) if weight else 0
        for part, weight, pod in zip(split(whole_ns, weights), weights, pods, strict=True)
    ]
    return split(whole_ns, turns)


def corrected(length_ns: int, pod: Pod, period_ns: int) -> int:
    """Return a pod's window with a part of its debt paid: integral feedback, as debt is the sum of all misses."""
    change_ns = -(pod.debt_ns // (PAID_OVER * STEP_NS)) * STEP_NS
    longest_ns = length_ns + max(LONGER_NS, round(LONGER * period_ns))
    return min(longest_ns, max(length_ns - round(SHORTER * length_ns), length_ns + change_ns))


def _period_of_turns(period_ns: int, weights: Sequence[int]) -> int:
    """Choose a period that leaves turns long enough for what moving gates costs."""
    wanted_ns = max(len(weights) * TURN_NS, MIN_TURN_NS * sum(weights) // min(weights))
    return max(period_ns, next((fits for fits in _PERIODS_NS if fits >= wanted_ns), _PERIODS_NS[-1]))


def by_timeslices(snapshot: Snapshot, weights: Sequence[int]) -> tuple[PodPlan, ...]:
    """Plan weights as hardware timeslices that add up to the period; every gate stays open.

    The ratio of the slices is the ratio of compute among the pods that are busy, and an idle pod costs
    nothing, so idle capacity is lent and taken back by the hardware itself. Where the period is longer than
    the longest timeslice the slices add up to that instead: cutting one of them off would bend the ratio.
    """
    parts = split(min(snapshot.period_ns, MAX_TIMESLICE_US * NS_PER_US), weights)
    return tuple(
        PodPlan(pod.name, pod.grant.pod_class, timeslice_us(part, pod), weight=weight)
        for pod, part, weight in zip(snapshot.pods, parts, weights, strict=True)
    )


def in_turns(lengths_ns: Sequence[int], on_idle: OnIdle, at: int = 0) -> list[tuple[Window, ...]]:
    """Lay windows of these lengths one after the other from ``at`` in the period; length 0 means no window."""
    windows: list[tuple[Window, ...]] = []
    for length in lengths_ns:
        windows.append((Window(at, at + length, on_idle),) if length > 0 else ())
        at += length
    return windows
