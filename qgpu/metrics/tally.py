"""Sums over a pGPU's ticks by pod, and its last seconds. The ledger keeps neither, so the tally watches every tick."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from qgpu.model import NS_PER_S, Plan, PodSample
from qgpu.sched.ledger import Account, Ledger

#: The current share of a pod is its share over this time, or two periods of the plan if that is longer.
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
            self.starts + sample.ended_starts + sum(tsg.starts for tsg in sample.tsgs),
            None if sample.preempted is None else (self.preempted or 0) + sample.preempted,
            None if sample.preempting is None else (self.preempting or 0) + sample.preempting,
        )


@dataclass(frozen=True, slots=True)
class Recent:
    """One pod on one pGPU over the last seconds; each part is 0 to 1 of that time."""

    #: Its GPU time.
    share: float = 0.0
    #: How long its gate was closed.
    gated: float = 0.0
    #: How often it was switched in per second.
    starts_per_s: float = 0.0
    #: It was known and busy all the time.
    busy_throughout: bool = False


class _Reading(NamedTuple):
    """A pod's sums at a tick, and since when it has been busy without a pause; None while it is idle."""

    used_ns: int = 0
    gated_ns: int = 0
    starts: int = 0
    busy_since_ns: int | None = None


@dataclass(slots=True)
class Tally:
    """Sums over one pGPU's ticks since the daemon started."""

    ticks: int = 0
    #: How often the plan in force changed.
    plans: int = 0
    pods: dict[str, PodTally] = field(default_factory=dict)
    _plan: Plan | None = None
    _recent: deque[tuple[int, dict[str, _Reading]]] = field(default_factory=deque)
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
            last = self._recent[-1][1] if self._recent else {}
            readings = {
                name: _read(account, pods[name], last.get(name), now_ns) for name, account in ledger.accounts.items()
            }
            self._recent.append((now_ns, readings))
            while len(self._recent) > 1 and now_ns - self._recent[1][0] >= self._span_ns:
                self._recent.popleft()

    @property
    def _span_ns(self) -> int:
        """Return how far back "recent" reaches: two periods at least, because a share of less means nothing."""
        return max(RECENT_NS, 2 * self._plan.period_ns if self._plan is not None else 0)

    def recent(self) -> dict[str, Recent]:
        """Return what each pod did over the last seconds; nothing before the second tick."""
        with self._lock:
            if len(self._recent) < 2:
                return {}
            (then_ns, before), (now_ns, now) = self._recent[0], self._recent[-1]
        elapsed_ns = max(1, now_ns - then_ns)
        return {
            name: Recent(
                _part(reading.used_ns - before.get(name, _NEW).used_ns, elapsed_ns),
                _part(reading.gated_ns - before.get(name, _NEW).gated_ns, elapsed_ns),
                max(0, reading.starts - before.get(name, _NEW).starts) * NS_PER_S / elapsed_ns,
                elapsed_ns >= self._span_ns and reading.busy_since_ns is not None and reading.busy_since_ns <= then_ns,
            )
            for name, reading in now.items()
        }


_NEW = _Reading()


def _read(account: Account, tally: PodTally, last: _Reading | None, now_ns: int) -> _Reading:
    since_ns = last.busy_since_ns if last is not None else None
    if since_ns is None:
        since_ns = now_ns
    return _Reading(account.used_ns, tally.gated_ns, tally.starts, since_ns if account.busy else None)


def _part(ns: int, elapsed_ns: int) -> float:
    return min(1.0, max(0, ns) / elapsed_ns)
