"""A log is not flooded."""

from __future__ import annotations

import structlog

from qgpu.linux.log_rate_limit import LogRateLimit


def test_flooding_lines_are_capped_per_second_and_counted() -> None:
    now = [0.0]
    limit = LogRateLimit(3, lambda: now[0])

    def written(kind: str) -> dict[str, object] | None:
        try:
            return limit(None, "info", {"event": kind})
        except structlog.DropEvent:
            return None

    first = [written("call failed") for _ in range(10)]
    other = written("pod retired")
    now[0] = 1.5
    later = written("call failed")

    assert [line is not None for line in first] == [True] * 3 + [False] * 7
    assert other == {"event": "pod retired"}
    assert later == {"event": "call failed", "suppressed": 7}
