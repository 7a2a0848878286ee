"""Best Effort (policy 0): every busy pod gets the same, whatever its quota says.

Properties:
- N busy pods get 1/N each; a pod alone gets everything.
- No gate is ever closed.
"""

from __future__ import annotations

from qgpu.model import Plan, Snapshot
from qgpu.policies.shares import by_timeslices


def plan(snapshot: Snapshot) -> Plan:
    """Give every pod the same weight."""
    return Plan(snapshot.pgpu, snapshot.period_ns, by_timeslices(snapshot, [1] * len(snapshot.pods)))
