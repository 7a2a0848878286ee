"""Wake-ups: when online work took the engine from another pod, by context switches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from qgpu.trace.recording import GpuTrack, PodTrack


@dataclass(frozen=True, slots=True)
class Wakeup:
    """An online pod runs again after another pod ran."""

    at_ns: int
    #: The pod that ran last.
    took_from: str
    #: How long the online pod was off the engine.
    rested_ns: int


def wakeups(gpu: GpuTrack, pod: PodTrack) -> Iterator[Wakeup]:
    """Yield the starts of a pod's runs that follow another pod's run."""
    others = sorted((end_ns, name) for name, other in gpu.pods.items() if other is not pod for _, end_ns in other.runs)
    ends = [end_ns for end_ns, _ in others]
    for (_, before_ns), (start_ns, _) in zip(pod.runs, pod.runs[1:], strict=False):
        at = bisect_right(ends, start_ns) - 1
        if at >= 0 and ends[at] > before_ns:
            yield Wakeup(start_ns, others[at][1], start_ns - before_ns)
