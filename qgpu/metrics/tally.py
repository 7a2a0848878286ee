"""Sums over a pGPU's ticks by pod. The ledger does not keep them, so the tally watches every tick."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from qgpu.model import NS_PER_S, Plan, PodSample
from qgpu.sched.ledger import Ledger

#: The current share of a pod is its share over this time.
RECENT_NS = 2 * NS_PER_S


@dataclass(frozen=True, slots=True)
class PodTally:
    """Sums over one pod's samples since the daemon knows it."""

    gated_ns: int = 0
    starts: int = 0
    #: Direct switches from an offline pod to an online one, away from this pod or to it; None if unknown.
    preempted: int | None = None
    preempting: int | None = None

    def __add__(self, sample: PodSample) -> PodTally:
        return PodTally(
            self.gated_ns + sample.gated_ns,
            self.starts + sum(tsg.starts for tsg in sample.tsgs),
            None if sample.preempted is None else (self.preempted or 0) + sample.preempted,
            None if sample.preempting is None else (self.preempting or 0) + sample.preempting,
        )


@dataclass(slots=True)
class Tally:
    """Sums over one pGPU's ticks since the daemon started."""

    ticks: int = 0
    #: How often the plan in force changed.
    plans: int = 0
    pods: dict[str, PodTally] = field(default_factory=dict)
    _plan: Plan | None = None
    _recent: deque[tuple[int, dict[str, int]]] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def watch(self, ledger: Ledger, _lost: int = 0) -> None:
        """Take a tick."""
        now_ns = ledger.now_ns or 0
        pods = {name: self.pods.get(name, PodTally()) + account.last for name, account in ledger.accounts.items()}
        with self._lock:
            self.pods = pods
            self.ticks += 1
            self.plans += ledger.plan is not None and ledger.plan != self._plan
            self._plan = ledger.plan
            self._recent.append((now_ns, {name: account.used_ns for name, account in ledger.accounts.items()}))
            while len(self._recent) > 1 and now_ns - self._recent[1][0] >= RECENT_NS:
                self._recent.popleft()

    def shares(self) -> dict[str, float]:
        """Return each pod's share of the pGPU over the last seconds, 0 to 1."""
        with self._lock:
            if len(self._recent) < 2:
                return {}
            (then_ns, before), (now_ns, now) = self._recent[0], self._recent[-1]
        elapsed_ns = max(1, now_ns - then_ns)
        return {name: min(1.0, max(0, used_ns - before.get(name, 0)) / elapsed_ns) for name, used_ns in now.items()}
