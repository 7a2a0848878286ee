"""Burst Share (policy 2): every pod gets at least its quota; idle capacity is lent in the ratio of quotas.

Properties:
- Busy pods share in the ratio of their quotas. Quotas add up to at most 100, so each pod gets at least its own.
- Pods without a quota divide equally what the quotas leave. Where quotas add up to 100, each gets a token turn.
- A gate closes only when timeslices alone leave a busy pod below its quota, and never while one pod is busy alone.
- A pod that wakes up is back at its share within one round of the runlist, or within one period where gates are needed.
"""

from __future__ import annotations

from qgpu.model import Plan, Snapshot
from qgpu.policies.mechanism import by_weights

#: Weights are per cent of the card times this factor, so that a token turn is a thousandth of a per cent.
_SCALE = 1000


def plan(snapshot: Snapshot) -> Plan:
    """Weigh every pod by its quota."""
    quotas = [pod.grant.cores for pod in snapshot.pods]
    left = 100 - sum([quota or 0 for quota in quotas])
    without_quota = max(1, left * _SCALE // max(1, quotas.count(None)))
    weights = [without_quota if quota is None else quota * _SCALE for quota in quotas]
    return by_weights(snapshot, weights)
