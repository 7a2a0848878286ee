"""A plan over its period: which gates are closed at a given moment, and when that changes next.

Pure arithmetic, shared by the user-space planes. The kernel module has its own implementation of the same rules.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType

from qgpu.model import NS_PER_MS, OnIdle, Plan, PodPlan, Window

#: The guardian lets a call take RM's lock this long after another pod's window: by then that pod's gate is closed.
_AFTER_CLOSE_NS = 3 * NS_PER_MS

#: No gate needs to close early.
NOBODY: Mapping[str, int] = MappingProxyType({})


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

    def until_next(self, phase_ns: int, early: Mapping[str, int] = NOBODY) -> int | None:
        """Return the ns from ``phase_ns`` to the next edge; None if no gate of this plan ever moves.

        ``early`` is how many ns before the end of its window a pod's gate begins to close.
        """
        if not self.plan.gated:
            return None
        at = bisect_right(self.edges, phase_ns)
        following = self.edges[at] if at < len(self.edges) else self.plan.period_ns
        ends = (self._end(pod, window, early) for pod in self.plan.pods if early for window in pod.windows or ())
        return min(following, min((end for end in ends if end > phase_ns), default=following)) - phase_ns

    def closed(self, phase_ns: int, idle: Set[str] = frozenset(), early: Mapping[str, int] = NOBODY) -> frozenset[str]:
        """Return the pods whose gates are closed at ``phase_ns``. The pods in ``idle`` have nothing to run.

        If every open window yields and belongs to an idle pod, the rest of it goes to the pods whose own windows yield.
        A gate that takes ``early`` ns to close begins that much before its window ends, unless it stays open then. A
        pod keeps at least half of its window.
        """
        current = [(pod, window) for pod in self.plan.pods if (window := _at(pod, phase_ns)) is not None]
        lent = bool(current) and all(w.on_idle is OnIdle.YIELD and pod.pod in idle for pod, w in current)
        ending = {
            pod.pod
            for pod, window in current
            if pod.pod in early
            and phase_ns >= self._end(pod, window, early)
            and pod.pod in self.closed(window.end_ns % self.plan.period_ns, idle)
        }
        return frozenset(
            pod.pod
            for pod in self.plan.pods
            if pod.pod in ending
            or (pod.windows is not None and _at(pod, phase_ns) is None and not (lent and _may_borrow(pod)))
        )

    def until_lock_fits(self, pod: str, phase_ns: int, held_ns: int) -> int:
        """Return the ns to wait before a call holds RM's lock for ``held_ns``, so that others' windows lose the least.

        Of equal moments it is the next one. A plan without gates has no windows: the answer is 0.
        """
        others = [window for each in self.plan.pods if each.pod != pod for window in each.windows or ()]
        period_ns = self.plan.period_ns
        starts = {0, *((window.end_ns + _AFTER_CLOSE_NS - phase_ns) % period_ns for window in others)}

        def cost(wait_ns: int) -> int:
            start_ns = phase_ns + wait_ns + period_ns - _AFTER_CLOSE_NS
            return self._overlap(start_ns, held_ns + _AFTER_CLOSE_NS, others)

        return min(sorted(starts), key=cost)

    def _overlap(self, start_ns: int, length_ns: int, windows: Iterable[Window]) -> int:
        """Return how much of the windows a span covers that begins within three periods of the plan."""
        period_ns, end_ns = self.plan.period_ns, start_ns + length_ns
        return sum(
            max(0, min(end_ns, window.end_ns + shift_ns) - max(start_ns, window.start_ns + shift_ns))
            for window in windows
            for shift_ns in range(0, end_ns, period_ns)
        )

    def _end(self, pod: PodPlan, window: Window, early: Mapping[str, int]) -> int:
        """Return when in the period a pod's gate begins to close for the end of a window, if it closes."""
        return window.end_ns - min(early.get(pod.pod, 0), (window.end_ns - window.start_ns) // 2)


def _at(pod: PodPlan, phase_ns: int) -> Window | None:
    return next((w for w in pod.windows or () if w.start_ns <= phase_ns < w.end_ns), None)


def _may_borrow(pod: PodPlan) -> bool:
    return any(window.on_idle is OnIdle.YIELD for window in pod.windows or ())
