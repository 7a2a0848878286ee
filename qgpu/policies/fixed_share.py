"""Fixed Share (policy 1): every pod gets exactly its quota, even when the card is otherwise idle.

Properties:
- A pod's gate is open for quota x period in every period, less what it had beyond its quota before, more what
  moving its gate cost it; windows of two pods never overlap. In the long run it never gets more than its quota.
- What nobody bought stays idle; a pod without a quota is never let on the card by this policy.
- A pod that was granted the whole card needs no gate.
- A program that starts needs little of the GPU, but again and again, and would wait for a window each time. So the
  gate of its pod stays open beside others' windows, with short slices for all, until it has had the few ms by which
  it counts as started. They are charged to it as anything beyond its quota; a pod in debt starts in its windows.
"""

from __future__ import annotations

from qgpu.model import OnIdle, Plan, Pod, PodPlan, Snapshot
from qgpu.model.hardware_traits import HardwareTraits, traits
from qgpu.policies.mechanism import SENSIBLE_US, SHORT_US, STEP_NS, corrected, in_turns, split, timeslice_us


def plan(snapshot: Snapshot) -> Plan:
    """Give every pod one window of its quota."""
    quotas = [snapshot.period_ns * (pod.grant.cores or 0) // 100 for pod in snapshot.pods]
    lengths = _fitting(
        [_paid(quota, pod, snapshot.period_ns) for quota, pod in zip(quotas, snapshot.pods, strict=True)],
        snapshot.period_ns,
    )
    windows = in_turns(lengths, OnIdle.KEEP)
    hardware = traits(snapshot.card)
    hurry = True in [pod.starting for pod in snapshot.pods]
    pods = tuple(
        PodPlan(
            pod.name,
            pod.grant.pod_class,
            _short_us(quota, pod, hardware) if hurry else timeslice_us(quota, pod, hardware),
            None if quota == snapshot.period_ns or _let_start(quota, pod) else own,
        )
        for pod, quota, own in zip(snapshot.pods, quotas, windows, strict=True)
    )
    return Plan(snapshot.pgpu, snapshot.period_ns, pods)


def _let_start(quota_ns: int, pod: Pod) -> bool:
    return pod.starting and quota_ns > 0 and pod.debt_ns < STEP_NS


def _short_us(quota_ns: int, pod: Pod, hardware: HardwareTraits) -> int:
    return min(timeslice_us(quota_ns, pod, hardware), max(SENSIBLE_US, SHORT_US // pod.busy_tsgs))


def _paid(quota_ns: int, pod: Pod, period_ns: int) -> int:
    return corrected(quota_ns, pod.debt_ns, period_ns) if 0 < quota_ns < period_ns else quota_ns


def _fitting(lengths: list[int], period_ns: int) -> list[int]:
    """Shorten windows in proportion where they are more than a period."""
    return split(period_ns, lengths) if sum(lengths) > period_ns else lengths
