"""Exchanges bids between the loops of several pGPUs, so that a gang gets the same turns on all of its pGPUs.

It only carries the bids; ``qgpu.policies.gangs`` turns them into turns. A loop reads the others' last bids, so
turns differ for one tick after a change.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from qgpu.model import Plan, Policy, Sharing, Snapshot
from qgpu.policies.gangs import Bids, agree, bids


@dataclass(slots=True)
class GangExchange:
    """The last bids of every pGPU's loop."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _busy: dict[int, frozenset[str]] = field(default_factory=dict)
    _bids: dict[int, Bids] = field(default_factory=dict)

    def in_step(self, policy: Policy, offline: Policy) -> Policy:
        """Return ``policy`` with gangs' turns added to its snapshots. A gang bids what ``offline`` would give it."""

        def plan(snapshot: Snapshot) -> Plan:
            return policy(self._met(snapshot, offline))

        return plan

    def leave(self, pgpu: int) -> None:
        """Drop the bids of a pGPU whose loop has ended."""
        with self._lock:
            self._busy.pop(pgpu, None)
            self._bids.pop(pgpu, None)

    def _met(self, snapshot: Snapshot, offline: Policy) -> Snapshot:
        pods = tuple(pod for pod in snapshot.pods if not pod.online)
        busy = frozenset(pod.name for pod in pods if pod.busy)
        with self._lock:
            self._busy[snapshot.pgpu] = busy
            alone = not any(busy & others for pgpu, others in self._busy.items() if pgpu != snapshot.pgpu)
            if alone:
                self._bids.pop(snapshot.pgpu, None)
                return snapshot
        by_slices = replace(snapshot, pods=pods, offline=Sharing())
        bids_here = bids(offline(by_slices), by_slices)
        with self._lock:
            self._bids[snapshot.pgpu] = bids_here
            period_ns, turns = agree(self._bids, snapshot.pgpu)
        return replace(snapshot, period_ns=period_ns, gang_turns=turns) if turns else snapshot
