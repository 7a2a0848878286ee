"""Turns of one pod's TSGs by gate: who has its turn, and who was seen to have work.

Beside an online pod only one busy TSG of an offline pod is open at a time, so that they don't cut each other at every
short slice and online work waits for one of them only. TSGs that had no work of late are left open: their first kernel
runs at once beside the one whose turn it is, and is seen at the next look. Then they wait for their turn as well.

Pure arithmetic, shared by the guardian and the simulator. All time is time in which the pod's own gate is open, so
turns nest in its windows whatever the two periods are.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from qgpu.model import NS_PER_MS, PodPlan
from qgpu.model.hardware_traits import SEVERAL_US

K = TypeVar("K", bound=Hashable)

#: How often it is looked who has work. So long a turn lasts that finds no work, and two TSGs cut each other where one
#: has found some.
LOOK_NS = 50 * NS_PER_MS

#: A TSG has work if it ran for more than this part of the time between two looks: all of more than a hundred that are
#: open together still do, and so do those that online work leaves little.
_LEAST_PART = 200


@dataclass(frozen=True, slots=True)
class TsgTurns(Generic[K]):
    """The turns of one pod's TSGs, as of now. Every method returns what becomes of them."""

    turn_ns: int
    #: TSGs that had work of late; the first has its turn, the others rest in the order of theirs.
    busy: tuple[K, ...] = ()
    #: GPU time so far of all the pod's TSGs, in ns, as of the last look.
    used_ns: Mapping[K, int] = field(default_factory=dict)
    #: For how long the first has had its turn, and how long ago the last look was.
    _had_ns: int = 0
    _looked_ns: int = 0

    @property
    def resting(self) -> frozenset[K]:
        """Name the TSGs that are to be closed while the pod's gate is open."""
        return frozenset(self.busy[1:])

    @property
    def look_due(self) -> bool:
        """Tell whether it is time to look who had work; with one TSG there is nothing to look for."""
        return len(self.used_ns) > 1 and self._looked_ns >= LOOK_NS

    @property
    def until_next_ns(self) -> int | None:
        """Return the ns to the next turn or look while the pod's gate is open; None where none will come."""
        if len(self.used_ns) < 2:
            return None
        look_ns = LOOK_NS - self._looked_ns
        return max(0, look_ns if len(self.busy) < 2 else min(look_ns, self.turn_ns - self._had_ns))

    def later(self, open_ns: int) -> TsgTurns[K]:
        """Let time pass with the pod's gate open; a turn that is over is followed by the next."""
        passed = replace(self, _had_ns=self._had_ns + open_ns, _looked_ns=self._looked_ns + open_ns)
        return passed._next() if len(self.busy) > 1 and passed._had_ns >= self.turn_ns else passed

    def shut(self) -> TsgTurns[K]:
        """Close the pod's gate: a turn that is nearly over ends with the window, which saves a move in the next one."""
        return self._next() if len(self.busy) > 1 and 4 * self._had_ns >= 3 * self.turn_ns else self

    def among(self, used_ns: Mapping[K, int]) -> TsgTurns[K]:
        """Forget TSGs that are no more, and know new ones by their GPU time so far; nothing is judged by it."""
        if used_ns.keys() == self.used_ns.keys():
            return self
        kept = {tsg: self.used_ns.get(tsg, used) for tsg, used in used_ns.items()}
        return replace(self._without(set(self.busy) - kept.keys()), used_ns=kept)

    def looked(self, used_ns: Mapping[K, int]) -> TsgTurns[K]:
        """Judge by the GPU time so far: who had its turn and no work loses it, who found some waits for its turn."""
        known = self.among(used_ns)
        least_ns = self._looked_ns // _LEAST_PART
        ran = [tsg for tsg, used in used_ns.items() if used - known.used_ns[tsg] > least_ns]
        # Who got its turn only just is judged next time. Who was alone had no turn that others waited for.
        tried = known.busy[:1] if 2 * known._had_ns >= known._looked_ns else ()
        after = known._without({tsg for tsg in tried if tsg not in ran})
        came = tuple(tsg for tsg in ran if tsg not in known.busy)
        had_ns = after._had_ns if len(after.busy) > 1 else 0
        return replace(after, busy=after.busy + came, used_ns=dict(used_ns), _had_ns=had_ns, _looked_ns=0)

    def _next(self) -> TsgTurns[K]:
        return replace(self, busy=self.busy[1:] + self.busy[:1], _had_ns=0)

    def _without(self, gone: Set[K]) -> TsgTurns[K]:
        """Take TSGs out; who follows the first begins a turn of its own."""
        busy = tuple(tsg for tsg in self.busy if tsg not in gone)
        return replace(self, busy=busy, _had_ns=self._had_ns if busy[:1] == self.busy[:1] else 0)


def all_at_once(part: PodPlan, busy_tsgs: int) -> PodPlan:
    """Return what comes nearest to a pod's part of a plan where its TSGs have no gates of their own.

    They share the slice that one of them would have, for online work waits for all; but they get no less than lets
    them make headway while they cut each other.
    """
    if part.tsg_turn_ns is None or busy_tsgs < 2:
        return replace(part, tsg_turn_ns=None)
    return replace(part, tsg_turn_ns=None, timeslice_us=max(SEVERAL_US, part.timeslice_us // busy_tsgs))
