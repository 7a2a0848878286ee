"""Who would gain from a share group (docs/groups.md): pods that hold a pGPU longer than their kernels run. Pure.

NVML tells the time in which any kernel ran, not whose. As pods run one at a time, that bounds each pod's part. Kernels
that leave SMs unused are not seen here. Whether pods trust each other is their owners' to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qgpu.trace.recording import GpuTrack

#: Less of the recorded time than this, held without a kernel, is not worth a group.
LEAST_UNUSED = 0.1
#: A pod that held the pGPU for less of the recorded time than this does not count.
LEAST_HELD = 0.05


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pod, the part of the time in which it held the pGPU, and the part in which it did so while no kernel ran.

    The latter is known as a range. All are 0 to 1 of the recorded time.
    """

    pod: str
    held: float
    unused_least: float
    unused_most: float


@dataclass(frozen=True, slots=True)
class Candidates:
    """Pods that would gain from a group; the parts of the time, 0 to 1, in which pods held the pGPU and kernels ran."""

    held: float
    used: float
    pods: tuple[Candidate, ...]

    def __str__(self) -> str:
        """Return it as one line."""
        pods = ", ".join(
            f"{each.pod} (held it {each.held:.0%}, without a kernel {_range(each.unused_least, each.unused_most)})"
            for each in self.pods
        )
        return (
            f"pods held it {self.held:.0%} of the time, kernels ran {self.used:.0%}; "
            f"if they trust each other, a share group fills the rest: {pods}"
        )


def candidates(held: Mapping[str, float], used: float | None) -> Candidates | None:
    """Return the pods that would gain, longest without a kernel first; None if nobody would, or that is unknown.

    ``held`` is each pod's part of the time on the engine, ``used`` NVML's utilization; 0 to 1 of the same time.
    """
    total = sum(held.values())
    sharing = [pod for pod, part in held.items() if part >= LEAST_HELD]
    if used is None or len(sharing) < 2 or total - used < LEAST_UNUSED:
        return None
    found = [
        Candidate(pod, held[pod], max(0.0, held[pod] - used), min(held[pod], total - used)) for pod in sorted(sharing)
    ]
    return Candidates(total, used, tuple(sorted(found, key=lambda each: (-each.unused_least, -each.unused_most))))


def of_track(gpu: GpuTrack) -> Candidates | None:
    """Return the pods of a recording that would gain; None if nobody would, or that is unknown."""
    if gpu.span_ns <= 0:
        return None
    return candidates({pod.pod: pod.traced_ns / gpu.span_ns for pod in gpu.pods.values()}, gpu.utilization)


def _range(least: float, most: float) -> str:
    return f"{most:.0%}" if f"{least:.0%}" == f"{most:.0%}" else f"{least * 100:.0f} to {most:.0%}"
