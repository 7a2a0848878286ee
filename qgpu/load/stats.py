"""Percentiles of latencies: pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` per cent of ``ordered`` (ascending) do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Return count, median, 90th and 99th percentile and maximum; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "p50": percentile(ordered, 50),
        "p90": percentile(ordered, 90),
        "p99": percentile(ordered, 99),
        "max": ordered[-1],
    }
