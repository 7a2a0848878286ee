"""A plan laid on the clock: whose gates are closed at a moment of the period, and when that changes next.

Pure arithmetic, shared by every user-space plane; the kernel module carries its own of the same rules.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Set
from dataclasses import dataclass, field

from qgpu.model import OnIdle, Plan, PodPlan, Window


@dataclass(frozen=True, slots=True)
class Timeline:
    """The gates of one plan over its period."""

    plan: Plan
    edges: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        edges = {0}
        for pod in self.plan.pods:
            for window in pod.windows or ():
                edges |= {window.start_ns, window.end_ns}
        edges.discard(self.plan.period_ns)
        object.__setattr__(self, "edges", tuple(sorted(edges)))

    def until_next(self, phase_ns: int) -> int | None:
        """Return the ns from ``phase_ns`` to the next edge; None when no gate of this plan ever moves."""
        if not self.plan.gated:
            return None
        at = bisect_right(self.edges, phase_ns)
        return (self.edges[at] if at < len(self.edges) else self.plan.period_ns) - phase_ns

    def closed(self, phase_ns: int, idle: Set[str] = frozenset()) -> frozenset[str]:
        """Name the pods whose gate is closed at ``phase_ns``, when the pods in ``idle`` have nothing to run.

        Where every window open at the moment is one that yields and belongs to an idle pod, the rest of it
        goes to the pods whose own windows yield.
        """
        current = [(pod, window) for pod in self.plan.pods if (window := _at(pod, phase_ns)) is not None]
        lent = bool(current) and all(w.on_idle is OnIdle.YIELD and pod.pod in idle for pod, w in current)
        return frozenset(
            pod.pod
            for pod in self.plan.pods
            if pod.windows is not None and _at(pod, phase_ns) is None and not (lent and _takes_part(pod))
        )


def _at(pod: PodPlan, phase_ns: int) -> Window | None:
    return next((w for w in pod.windows or () if w.start_ns <= phase_ns < w.end_ns), None)


def _takes_part(pod: PodPlan) -> bool:
    return any(window.on_idle is OnIdle.YIELD for window in pod.windows or ())
