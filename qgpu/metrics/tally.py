"""What of a pGPU's ticks is only to be had by counting along: shown every ledger, it keeps sums by pod."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field, replace

from qgpu.model import NS_PER_S, Plan
from qgpu.sched.ledger import Ledger

#: Over how long "now" is taken where a share of the present is asked for.
RECENT_NS = 2 * NS_PER_S


@dataclass(frozen=True, slots=True)
class PodTally:
    """Sums over one pod's samples since the daemon knows it."""

    gated_ns: int = 0
    starts: int = 0


@dataclass(slots=True)
class Tally:
    """Sums over one pGPU's ticks since the daemon started."""

    ticks: int = 0
    #: How often what is in force was changed.
    plans: int = 0
    pods: dict[str, PodTally] = field(default_factory=dict)
    _plan: Plan | None = None
    _recent: deque[tuple[int, dict[str, int]]] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def watch(self, ledger: Ledger, _lost: int = 0) -> None:
        """Take a tick."""
        now_ns = ledger.now_ns or 0
        pods = {}
        for name, account in ledger.accounts.items():
            before, last = self.pods.get(name, PodTally()), account.last
            starts = sum(tsg.starts for tsg in last.tsgs)
            pods[name] = replace(before, gated_ns=before.gated_ns + last.gated_ns, starts=before.starts + starts)
        with self._lock:
            self.pods = pods
            self.ticks += 1
            self.plans += ledger.plan is not None and ledger.plan != self._plan
            self._plan = ledger.plan
            self._recent.append((now_ns, {name: account.used_ns for name, account in ledger.accounts.items()}))
            while now_ns - self._recent[1][0] >= RECENT_NS if len(self._recent) > 1 else False:
                self._recent.popleft()

    def shares(self) -> dict[str, float]:
        """Return each pod's share of the pGPU over the last seconds, 0 to 1."""
        with self._lock:
            if len(self._recent) < 2:
                return {}
            (then_ns, before), (now_ns, now) = self._recent[0], self._recent[-1]
        elapsed_ns = max(1, now_ns - then_ns)
        return {name: min(1.0, max(0, used_ns - before.get(name, 0)) / elapsed_ns) for name, used_ns in now.items()}
