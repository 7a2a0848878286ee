"""Fixed Share (policy 1): every pod gets exactly its quota, even when the card is otherwise idle.

Properties:
- A pod's gate is open for quota x period in every period, less what it had beyond its quota before, more what
  moving its gate cost it; windows of two pods never overlap. In the long run it never gets more than its quota.
- What nobody bought stays idle; a pod without a quota is never let on the card by this policy.
- A pod that was granted the whole card needs no gate.
"""

from __future__ import annotations

from qgpu.model import OnIdle, Plan, Pod, PodPlan, Snapshot
from qgpu.policies.shares import corrected, in_turns, split, timeslice_us


def plan(snapshot: Snapshot) -> Plan:
    """Give every pod one window of its quota."""
    quotas = [snapshot.period_ns * (pod.grant.cores or 0) // 100 for pod in snapshot.pods]
    lengths = _fitting(
        [_paid(quota, pod, snapshot.period_ns) for quota, pod in zip(quotas, snapshot.pods, strict=True)],
        snapshot.period_ns,
    )
    pods = tuple(
        PodPlan(
            pod.name,
            pod.grant.pod_class,
            timeslice_us(quota, pod),
            None if quota == snapshot.period_ns else windows,
        )
        for pod, quota, windows in zip(snapshot.pods, quotas, in_turns(lengths, OnIdle.KEEP), strict=True)
    )
    return Plan(snapshot.pgpu, snapshot.period_ns, pods)


def _paid(quota_ns: int, pod: Pod, period_ns: int) -> int:
    return corrected(quota_ns, pod.debt_ns, period_ns) if 0 < quota_ns < period_ns else quota_ns


def _fitting(lengths: list[int], period_ns: int) -> list[int]:
    """Shorten windows in proportion where they are more than a period."""
    return split(period_ns, lengths) if sum(lengths) > period_ns else lengths
