"""A row of a results file to which several runs of the same sources add up; one of other sources starts it again.

Each run goes on with the seeds after those of the last, so that none counts twice. A run that failed counts as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: How figures add up that are no counts. What a run saw of kinds, another may have seen too.
OTHERWISE = {"fault_kinds": max, "fault_combinations": max, "open_after_answer_s": max, "lockdep_on_at_the_end": min}


def row(results: Mapping[str, Any], name: str, digest: str) -> dict[str, Any]:
    """Return the row of this name, empty if it is of other sources."""
    before = results.get(name, {})
    if before.get("sources") == digest:
        return dict(before)
    return {"sources": digest, "next_seed": 1, "figures": {}}


def figures(before: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a row with those of one more run. Raises ValueError for one that cannot be added."""
    total = dict(before)
    for name, value in more.items():
        if name in OTHERWISE:
            total[name] = OTHERWISE[name](total.get(name, value), value)
        elif isinstance(value, int):
            total[name] = total.get(name, 0) + value
        else:
            raise ValueError(f"{name}: {value} is no count; say in {__name__}.OTHERWISE how it adds up")
    return total
