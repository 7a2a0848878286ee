"""Turns of one pod's TSGs by gate: which TSG has its turn, and which TSGs have work.

Beside an online pod only one busy TSG of an offline pod is open at a time. Otherwise those TSGs would preempt each
other at every short slice, and online work would wait for all of them. A TSG without recent work stays open: its first
kernel runs at once, beside the TSG whose turn it is. The next check finds it busy, and from then on it waits for its
turn.

Pure arithmetic, shared by the guardian and the simulator. Time counts only while the pod's own gate is open, so these
turns fit into the pod's windows whatever the two periods are.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from qgpu.model import NS_PER_MS, PodPlan
from qgpu.model.hardware_traits import MIN_PARALLEL_TIMESLICE_US

K = TypeVar("K", bound=Hashable)

#: How often TSGs are checked for work. A turn without work lasts this long at most, and a TSG that has new work runs
#: beside another one for this long at most.
CHECK_NS = 50 * NS_PER_MS

#: A TSG has work if it ran for more than one part in this many of the time between two checks. That holds even for each
#: of more than a hundred TSGs that are open together, and for TSGs to which online work leaves little time. Those that
#: ran for less may together have one part in _LEAST_PART_TOGETHER; beyond that the longest of them have work, too.
_LEAST_PART, _LEAST_PART_TOGETHER = 200, 20


@dataclass(frozen=True, slots=True)
class TsgTurns(Generic[K]):
    """The current turns of one pod's TSGs. Immutable: every method returns the next state."""

    turn_ns: int
    #: TSGs that had work lately. The first has its turn; the others follow in this order.
    busy: tuple[K, ...] = ()
    #: Total GPU time of each of the pod's TSGs at the last check, in ns.
    used_ns: Mapping[K, int] = field(default_factory=dict)
    #: How long the first has had its turn, and how long ago the last check was.
    _had_ns: int = 0
    _unchecked_ns: int = 0

    @property
    def resting(self) -> frozenset[K]:
        """Return the TSGs whose gates are closed while the pod's gate is open."""
        return frozenset(self.busy[1:])

    @property
    def check_due(self) -> bool:
        """Tell whether TSGs are due for a check; a single TSG never is."""
        return len(self.used_ns) > 1 and self._unchecked_ns >= CHECK_NS

    @property
    def until_next_ns(self) -> int | None:
        """Return the ns to the next turn or check while the pod's gate is open; None for a single TSG."""
        if len(self.used_ns) < 2:
            return None
        check_ns = CHECK_NS - self._unchecked_ns
        return max(0, check_ns if len(self.busy) < 2 else min(check_ns, self.turn_ns - self._had_ns))

    def advanced(self, open_ns: int) -> TsgTurns[K]:
        """Advance by ``open_ns`` with the pod's gate open. If the turn is over, begin the next one."""
        passed = replace(self, _had_ns=self._had_ns + open_ns, _unchecked_ns=self._unchecked_ns + open_ns)
        return passed._next() if len(self.busy) > 1 and passed._had_ns >= self.turn_ns else passed

    def gate_closed(self) -> TsgTurns[K]:
        """Note that the pod's gate closes. A turn that is three quarters over ends now, which saves a switch later."""
        return self._next() if len(self.busy) > 1 and 4 * self._had_ns >= 3 * self.turn_ns else self

    def with_tsgs(self, used_ns: Mapping[K, int]) -> TsgTurns[K]:
        """Drop TSGs that no longer exist and add new ones with their GPU time so far, without a check."""
        if used_ns.keys() == self.used_ns.keys():
            return self
        kept = {tsg: self.used_ns.get(tsg, used) for tsg, used in used_ns.items()}
        return replace(self._without(set(self.busy) - kept.keys()), used_ns=kept)

    def checked(self, used_ns: Mapping[K, int]) -> TsgTurns[K]:
        """Check for work by total GPU time. A TSG that did nothing with its turn loses it; TSGs with new work queue."""
        known = self.with_tsgs(used_ns)
        ran = self._ran({tsg: used - known.used_ns[tsg] for tsg, used in used_ns.items()})
        # A TSG loses its turn only if it had it for at least half of the time since the last check.
        tried = known.busy[:1] if 2 * known._had_ns >= known._unchecked_ns else ()
        after = known._without({tsg for tsg in tried if tsg not in ran})
        came = tuple(tsg for tsg in ran if tsg not in known.busy)
        had_ns = after._had_ns if len(after.busy) > 1 else 0  # alone, it kept no other TSG waiting
        return replace(after, busy=after.busy + came, used_ns=dict(used_ns), _had_ns=had_ns, _unchecked_ns=0)

    def _ran(self, ran_ns: Mapping[K, int]) -> list[K]:
        """List the TSGs that had work, given how long each ran since the last check."""
        least_ns, together_ns, short = self._unchecked_ns // _LEAST_PART, 0, set[K]()
        for tsg in sorted(ran_ns, key=ran_ns.__getitem__):
            together_ns += ran_ns[tsg]
            if ran_ns[tsg] > least_ns or together_ns > self._unchecked_ns // _LEAST_PART_TOGETHER:
                break
            short.add(tsg)
        return [tsg for tsg in ran_ns if tsg not in short]

    def _next(self) -> TsgTurns[K]:
        return replace(self, busy=self.busy[1:] + self.busy[:1], _had_ns=0)

    def _without(self, gone: Set[K]) -> TsgTurns[K]:
        """Remove TSGs. If the first is among them, the next one begins its turn."""
        busy = tuple(tsg for tsg in self.busy if tsg not in gone)
        return replace(self, busy=busy, _had_ns=self._had_ns if busy[:1] == self.busy[:1] else 0)


def all_at_once(part: PodPlan, busy_tsgs: int) -> PodPlan:
    """Return the nearest plan for a pod on a plane that has no gate for each TSG: all of its TSGs run at once.

    They split the slice of one TSG, because online work waits for all of them. Each keeps at least
    MIN_PARALLEL_TIMESLICE_US, so that they make progress while they preempt each other.
    """
    if part.tsg_turn_ns is None or busy_tsgs < 2:
        return replace(part, tsg_turn_ns=None)
    return replace(part, tsg_turn_ns=None, timeslice_us=max(MIN_PARALLEL_TIMESLICE_US, part.timeslice_us // busy_tsgs))
