"""Best Effort (policy 0): every busy pod gets the same share, whatever its quota.

Properties:
- N busy pods get 1/N each; a pod that is busy alone gets the whole pGPU.
- The policy closes no gate, and makes no round shorter than the one that the driver's own timeslices make. It promises
  no share, so nothing justifies slowing another pod down.
"""

from __future__ import annotations

from qgpu.model import Plan, Snapshot
from qgpu.policies.mechanism import by_weights


def plan(snapshot: Snapshot) -> Plan:
    """Give every pod the same weight."""
    return by_weights(snapshot, [1] * len(snapshot.pods), gates=False)
