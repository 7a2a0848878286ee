"""Fixed Share (policy 1): every pod gets exactly its quota, even when the card is otherwise idle.

Properties:
- A pod's gate is open for quota x period in every period, and windows of two pods never overlap.
- What nobody bought stays idle; a pod without a quota is never let on the card by this policy.
- A pod that was granted the whole card needs no gate.
"""

from __future__ import annotations

from qgpu.model import OnIdle, Plan, PodPlan, Snapshot
from qgpu.policies.shares import in_turns, timeslice_us


def plan(snapshot: Snapshot) -> Plan:
    """Give every pod one window of its quota."""
    lengths = [snapshot.period_ns * (pod.grant.cores or 0) // 100 for pod in snapshot.pods]
    pods = tuple(
        PodPlan(
            pod.name,
            pod.grant.pod_class,
            timeslice_us(length, pod),
            None if length == snapshot.period_ns else windows,
        )
        for pod, length, windows in zip(snapshot.pods, lengths, in_turns(lengths, OnIdle.KEEP), strict=True)
    )
    return Plan(snapshot.pgpu, snapshot.period_ns, pods)
