"""An online service under measurement: one kernel every 10 ms; records the latency of its requests and when it ran."""

from __future__ import annotations

from dataclasses import dataclass

from progress import Span
from rivals import Way

PERIOD_US = 10_000


@dataclass(frozen=True, slots=True)
class Served:
    """Latency of requests in µs, from launch to synchronised, and when the service ran."""

    p50_us: float
    p99_us: float
    span: Span


def serve(way: Way, kernel: str, seconds: float) -> Served:
    """Run a service for a while (half of it with ``--quick``), in an online pod if there are pods."""
    duration = f"{1000 * seconds * way.script.scale:.0f}ms"
    options = ("--period", f"{PERIOD_US}us", "--warmup", "300ms", "--duration", duration)
    result = way.start("online", kernel, *options, pod_class="online").finish().result
    span = Span(result["started_ns"] / 1e9, result["ended_ns"] / 1e9, {})
    return Served(result["latency_us"]["p50"], result["latency_us"]["p99"], span)
