"""The last hour of one pGPU, a point every 15 seconds: each pod's share, and the policy then in force.

It is kept in memory only, for pages that open later. Its size is bounded, however many pods come and go.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from qgpu.daemon.gpu_loop import GpuLoop
from qgpu.daemon.request_args import Arguments
from qgpu.errors import no_pgpu
from qgpu.ipc.control_socket import Session
from qgpu.model import NS_PER_S
from qgpu.sched.ledger import Ledger

#: The length of one point, and how many are kept: an hour.
STEP_NS = 15 * NS_PER_S
POINTS = 240
#: A point names at most this many pods; the rest is summed up under OTHERS, which is no pod's name.
MAX_PODS = 64
OTHERS = ""


@dataclass(frozen=True, slots=True)
class _Point:
    at: float
    policy: str
    shares: dict[str, float]


class ShareHistory:
    """Folds ticks of one pGPU into points."""

    def __init__(self, policy: Callable[[], str], clock: Callable[[], float] = time.time) -> None:
        """``policy`` returns the name of the policy in force; ``clock`` the wall clock's time in seconds."""
        self._policy, self._clock = policy, clock
        self._lock = threading.Lock()
        self._points: deque[_Point] = deque(maxlen=POINTS)
        #: Each pod's GPU time at the last tick, and what it used in the current point, in ns.
        self._last: dict[str, int] = {}
        self._used: dict[str, int] = {}
        self._began_ns: int | None = None

    def watch(self, ledger: Ledger, _lost: int = 0) -> None:
        """Take a tick."""
        now_ns = ledger.now_ns or 0
        used = {name: account.used_ns for name, account in ledger.accounts.items()}
        for name, used_ns in used.items():
            last_ns = self._last.get(name, 0)
            since_ns = used_ns - last_ns if used_ns >= last_ns else used_ns  # another pod of the same name
            self._used[name] = self._used.get(name, 0) + since_ns
        self._last = used
        if self._began_ns is None:
            self._began_ns, self._used = now_ns, {}
        elif now_ns - self._began_ns >= STEP_NS:
            point = _Point(round(self._clock(), 3), self._policy(), _shares(self._used, now_ns - self._began_ns))
            self._began_ns, self._used = now_ns, {}
            with self._lock:
                self._points.append(point)

    def to_json(self) -> dict[str, Any]:
        """Return the points, oldest first: when each ended (s since 1970), the policy, and shares (0 to 1) by pod.

        Pods that used nothing are left out.
        """
        with self._lock:
            return {"step_s": STEP_NS // NS_PER_S, "points": [asdict(point) for point in self._points]}


class ShareHistories:
    """The histories of all pGPUs, and the request that reads one."""

    def __init__(self, loops: Mapping[int, GpuLoop]) -> None:
        self._histories = {index: ShareHistory(partial(_policy, loop)) for index, loop in loops.items()}
        for index, loop in loops.items():
            loop.watch(self._histories[index].watch)

    def read(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Return the history of one pGPU. Raises UnknownNameError."""
        index = arguments.need("gpu", int)
        if index not in self._histories:
            raise no_pgpu(index, self._histories)
        return self._histories[index].to_json()


def _policy(loop: GpuLoop) -> str:
    return loop.settings.policy


def _shares(used_ns: dict[str, int], elapsed_ns: int) -> dict[str, float]:
    ordered = sorted(used_ns, key=lambda name: -used_ns[name])
    named = {name: used_ns[name] for name in ordered[:MAX_PODS]}
    named[OTHERS] = sum(used_ns[name] for name in ordered[MAX_PODS:])
    shares = {name: round(min(1.0, ns / elapsed_ns), 4) for name, ns in named.items()}
    return {name: share for name, share in shares.items() if share}
