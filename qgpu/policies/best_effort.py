"""Best Effort (policy 0): every busy pod gets the same, whatever its quota says.

Properties:
- N busy pods get 1/N each; a pod alone gets everything.
- No gate is ever closed, and no pod's part of a round is shorter than the driver's timeslice: nobody was promised a
  share that would be worth making others slower.
"""

from __future__ import annotations

from qgpu.model import Plan, Snapshot
from qgpu.policies.mechanism import by_weights


def plan(snapshot: Snapshot) -> Plan:
    """Give every pod the same weight."""
    return by_weights(snapshot, [1] * len(snapshot.pods), gates=False)
