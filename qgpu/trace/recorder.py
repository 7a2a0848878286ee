"""The daemon's side of a recording: what each tick told, kept until the one who asked for it fetches it.

It keeps what it is shown and no more than it may; what does not fit is dropped whole, oldest first, and
counted. What is made of it is its reader's business.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from qgpu.ipc.codec import plan_to
from qgpu.model import Plan
from qgpu.sched.ledger import Account, Ledger

#: What may wait for the reader: at 6,000 switches a second, the worst the hardware does, half a minute.
MAX_SPANS = 200_000
#: As how many spans a tick counts, and each pod in it, beside those it tells: they take as much memory.
_WITHOUT_SPANS = 8
#: What one answer holds at most.
_ANSWER_SPANS = 50_000


class Recorder:
    """The ticks of one pGPU, waiting to be fetched."""

    def __init__(self, pgpu: int) -> None:
        self.pgpu = pgpu
        #: Runs and closed gates that the reader was too slow for.
        self.dropped = 0
        self._lock = threading.Lock()
        #: Each with what it counts as, and the spans in it.
        self._ticks: deque[tuple[int, int, dict[str, Any]]] = deque()
        self._waiting = 0
        self._plan: Plan | None = None

    def watch(self, ledger: Ledger, lost: int) -> None:
        """Take a tick."""
        plan, self._plan = self._plan, ledger.plan
        pods = [_told(name, account) for name, account in ledger.accounts.items()]
        tick = {
            "gpu": self.pgpu,
            "now_ns": ledger.now_ns or 0,
            "lost": lost,
            "pods": pods,
        }
        if ledger.plan is not None and ledger.plan != plan:
            tick["plan"] = plan_to(ledger.plan)
        spans = sum(len(pod["closed"]) + sum(len(tsg["runs"]) for tsg in pod["tsgs"]) for pod in pods)
        size = spans + _WITHOUT_SPANS * (1 + len(pods))
        with self._lock:
            self._ticks.append((size, spans, tick))
            self._waiting += size
            while self._waiting > MAX_SPANS:
                gone, dropped, _ = self._ticks.popleft()
                self._waiting -= gone
                self.dropped += dropped

    def fetch(self) -> list[dict[str, Any]]:
        """Hand out what waits, oldest first; more may be left."""
        found: list[dict[str, Any]] = []
        with self._lock:
            room = _ANSWER_SPANS
            while self._ticks and (not found or self._ticks[0][0] <= room):
                size, _, tick = self._ticks.popleft()
                self._waiting -= size
                room -= size
                found.append(tick)
        return found


def _told(name: str, account: Account) -> dict[str, Any]:
    last = account.last
    return {
        "pod": name,
        "class": last.grant.pod_class.value,
        "cores": last.grant.cores,
        "used_ns": account.used_ns,
        "debt_ns": account.debt_ns,
        "busy": account.busy,
        "gated_ns": last.gated_ns,
        "closed": last.closed,
        "tsgs": [{"tsg": tsg.tsg, "run_ns": tsg.run_ns, "starts": tsg.starts, "runs": tsg.runs} for tsg in last.tsgs],
    }
