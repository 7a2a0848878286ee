"""Arithmetic that policies have in common: dividing a whole by weights. It knows nothing of GPUs or time.

A pod's part of a round of the runlist is divided by its own busy TSGs, because the hardware gives every TSG
a turn: a pod of ten processes gets a pod's share, not ten. Nothing is ever divided by a number that another
pod can inflate.
"""

from __future__ import annotations

from collections.abc import Sequence

from qgpu.model import MAX_TIMESLICE_US, MIN_TIMESLICE_US, NS_PER_US, OnIdle, Pod, PodPlan, Snapshot, Window


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


def by_timeslices(snapshot: Snapshot, weights: Sequence[int]) -> tuple[PodPlan, ...]:
    """Plan weights as hardware timeslices that add up to the period; every gate stays open.

    The ratio of the slices is the ratio of compute among the pods that are busy, and an idle pod costs
    nothing, so idle capacity is lent and taken back by the hardware itself. Where the period is longer than
    the longest timeslice the slices add up to that instead: cutting one of them off would bend the ratio.
    """
    parts = split(min(snapshot.period_ns, MAX_TIMESLICE_US * NS_PER_US), weights)
    return tuple(
        PodPlan(pod.name, pod.grant.pod_class, timeslice_us(part, pod))
        for pod, part in zip(snapshot.pods, parts, strict=True)
    )


def in_turns(lengths_ns: Sequence[int], on_idle: OnIdle, at: int = 0) -> list[tuple[Window, ...]]:
    """Lay windows of these lengths one after the other from ``at`` in the period; length 0 means no window."""
    windows: list[tuple[Window, ...]] = []
    for length in lengths_ns:
        windows.append((Window(at, at + length, on_idle),) if length > 0 else ())
        at += length
    return windows
