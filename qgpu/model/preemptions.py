"""Preemptions: switches of the engine from an offline pod directly to an online one. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from qgpu.model import PodClass


def preemptions(
    handovers: Mapping[tuple[str, str], int], classes: Mapping[str, PodClass]
) -> tuple[Counter[str], Counter[str]]:
    """Return the number of preemptions by preempted pod, and by preempting pod.

    ``handovers`` counts direct switches by (pod before, pod after).
    """
    preempted: Counter[str] = Counter()
    preempting: Counter[str] = Counter()
    for (before, after), count in handovers.items():
        if classes.get(before) is PodClass.OFFLINE and classes.get(after) is PodClass.ONLINE:
            preempted[before] += count
            preempting[after] += count
    return preempted, preempting
