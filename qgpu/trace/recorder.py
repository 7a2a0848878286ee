"""The daemon's side of a recording: keeps the data of each tick until the client fetches it.

Its memory is bounded. If the client is too slow, whole ticks are dropped, oldest first, and counted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from qgpu.ipc.codec import plan_to_json
from qgpu.model import Plan
from qgpu.model.suspension import Residency
from qgpu.sched.ledger import Account, Ledger

#: The most spans that wait for the reader: half a minute at 6,000 switches a second, the hardware's worst case.
MAX_SPANS = 200_000
#: A tick, and each pod in it, counts as this many spans besides the recorded ones: it takes as much memory.
_WITHOUT_SPANS = 8
#: The most spans in one answer.
_ANSWER_SPANS = 50_000


class Recorder:
    """The ticks of one pGPU, waiting to be fetched."""

    def __init__(self, pgpu: int, residency: Callable[[str], Residency] = lambda _pod: Residency.RUNNING) -> None:
        """``residency`` tells where a pod is, by name."""
        self.pgpu = pgpu
        self._residency = residency
        #: Runs and closed gates dropped because the reader was too slow.
        self.dropped = 0
        self._lock = threading.Lock()
        #: Ticks, each with its size in spans, and the number of recorded spans in it.
        self._ticks: deque[tuple[int, int, dict[str, Any]]] = deque()
        self._waiting = 0
        self._plan: Plan | None = None

    def watch(self, ledger: Ledger, lost: int) -> None:
        """Take a tick."""
        plan, self._plan = self._plan, ledger.plan
        pods = [_pod_json(name, account, self._residency(name)) for name, account in ledger.accounts.items()]
        tick: dict[str, Any] = {
            "gpu": self.pgpu,
            "now_ns": ledger.now_ns or 0,
            "lost": lost,
            "utilization": ledger.utilization,
            "pods": pods,
        }
        if ledger.plan is not None and ledger.plan != plan:
            tick["plan"] = plan_to_json(ledger.plan)
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
        """Return waiting ticks, oldest first, and forget them. More may be left."""
        found: list[dict[str, Any]] = []
        with self._lock:
            room = _ANSWER_SPANS
            while self._ticks and (not found or self._ticks[0][0] <= room):
                size, _, tick = self._ticks.popleft()
                self._waiting -= size
                room -= size
                found.append(tick)
        return found


def _pod_json(name: str, account: Account, residency: Residency) -> dict[str, Any]:
    last = account.last
    return {
        "pod": name,
        "class": last.grant.pod_class.value,
        "cores": last.grant.cores,
        "state": residency.value,
        "used_ns": account.used_ns,
        "debt_ns": account.debt_ns,
        "busy": account.busy,
        "gated_ns": last.gated_ns,
        "closed": last.closed,
        "tsgs": [{"tsg": tsg.tsg, "run_ns": tsg.run_ns, "starts": tsg.starts, "runs": tsg.runs} for tsg in last.tsgs],
    }
