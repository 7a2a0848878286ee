"""The result of a simulated scenario: numbers per pod, as a table for people and as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from qgpu.config import GpuSettings
from qgpu.model import NS_PER_MS, PodClass

SCHEMA = "qgpu/v1"


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies in µs, from launch to synchronisation."""

    n: int
    p50: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class PodReport:
    """What one pod asked for and got during its stay."""

    name: str
    pod_class: PodClass
    #: Its quota in per cent of the pGPU (the mean over its stay, if it changed); None without one.
    cores: float | None
    present_s: float
    #: Its GPU time, and that as a share of its stay (0 to 1).
    gpu_time_s: float
    share: float
    kernels: int
    kernels_per_s: float
    #: Kernels per second, relative to the same pod alone on an empty pGPU.
    vs_alone: float
    latency_us: Latencies | None
    alone_latency_us: Latencies | None


@dataclass(frozen=True, slots=True)
class Moment:
    """The interval up to ``at_s``: each present pod's share of the pGPU, and the quotas of pods that have one."""

    at_s: float
    shares: dict[str, float]
    quotas: dict[str, float]


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a scenario. ``useful``, ``switching`` and ``idle`` are parts of the pGPU's time and add up to 1."""

    scenario: str
    duration_s: float
    settings: GpuSettings
    useful: float
    switching: float
    idle: float
    pods: tuple[PodReport, ...]
    moments: tuple[Moment, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report for programs: times in s or µs as named, shares 0 to 1, ``cores`` in per cent."""
        return {
            "schema": SCHEMA,
            "scenario": self.scenario,
            "duration_s": self.duration_s,
            "gpu": asdict(self.settings) | {"useful": self.useful, "switching": self.switching, "idle": self.idle},
            "pods": [_pod_json(pod) for pod in self.pods],
        }

    def table(self) -> str:
        """Return the report for people."""
        head = ("POD", "CLASS", "ASKED", "GOT", "GPU TIME", "KERNELS/S", "VS ALONE", "P50", "P99", "ALONE P99")
        rows = [head, *(_cells(pod) for pod in self.pods)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        gpu = self.settings
        lines += [
            "",
            f"{self.duration_s:g} s of {gpu.policy}, online {gpu.online_policy}, "
            f"period {gpu.period_ns / NS_PER_MS:g} ms; "
            f"pGPU {self.useful:.1%} useful, {self.switching:.1%} switching, {self.idle:.1%} idle",
        ]
        return "\n".join(line.rstrip() for line in lines)


def _pod_json(pod: PodReport) -> dict[str, Any]:
    values = asdict(pod)
    return {"class": values.pop("pod_class").value} | values


def _cells(pod: PodReport) -> tuple[str, ...]:
    alone = pod.alone_latency_us
    return (
        pod.name,
        pod.pod_class.value,
        "-" if pod.cores is None else f"{pod.cores:g} %",
        f"{pod.share:.1%}",
        f"{pod.gpu_time_s:.2f} s",
        f"{pod.kernels_per_s:.1f}",
        f"{pod.vs_alone:.1%}",
        "-" if pod.latency_us is None else f"{pod.latency_us.p50:.0f} µs",
        "-" if pod.latency_us is None else f"{pod.latency_us.p99:.0f} µs",
        "-" if alone is None else f"{alone.p99:.0f} µs",
    )
