"""Fixed Share (policy 1): every pod gets exactly its quota, even when the card is otherwise idle.

Properties:
- In every period a pod's gate is open for quota x period. GPU time that the pod used beyond its quota is subtracted,
  and time that it lost to moving its gate is added. Windows of two pods never overlap. In the long run a pod never gets
  more than its quota.
- Time that no quota covers stays idle. A pod without a quota never runs under this policy.
- A pod with a quota of 100 needs no gate.
- A starting program needs the GPU often, but only for a short time, and would wait for a window each time. So the gate
  of its pod stays open during the windows of others, with short slices for all pods, until the pod has run a few ms in
  short turns, for three seconds at most. That time is charged like any use beyond the quota, and a pod in debt starts
  in its own windows. So a pod that runs without pause uses the windows of others for one period only. A pod that starts
  over and over gets at most half a per cent of the card in this way, however much of its quota is left; all pods
  together get at most two per cent.
"""

from __future__ import annotations

from qgpu.model import OnIdle, Plan, Pod, PodPlan, Snapshot
from qgpu.model.hardware_traits import HardwareTraits, traits
from qgpu.policies.mechanism import (
    MAX_SHORTER,
    MIN_WORTHWHILE_US,
    SHORT_SLICE_US,
    STEP_NS,
    consecutive_windows,
    debt_corrected,
    shortened_to,
    split,
    timeslice_us,
)


def plan(snapshot: Snapshot) -> Plan:
    """Give every pod one window of its quota."""
    quotas = [snapshot.period_ns * (pod.grant.cores or 0) // 100 for pod in snapshot.pods]
    lengths = _fit_into_period(
        [
            _debt_corrected_quota(quota, pod, snapshot.period_ns)
            for quota, pod in zip(quotas, snapshot.pods, strict=True)
        ],
        quotas,
        snapshot.period_ns,
    )
    windows = consecutive_windows(lengths, OnIdle.KEEP)
    hardware = traits(snapshot.card)
    starting = True in [pod.starting for pod in snapshot.pods]
    pods = tuple(
        PodPlan(
            pod.name,
            pod.grant.pod_class,
            _short_us(quota, pod, hardware) if starting else timeslice_us(quota, pod, hardware),
            None if quota == snapshot.period_ns or _may_start(quota, pod) else own,
        )
        for pod, quota, own in zip(snapshot.pods, quotas, windows, strict=True)
    )
    return Plan(snapshot.pgpu, snapshot.period_ns, pods)


def _may_start(quota_ns: int, pod: Pod) -> bool:
    return pod.starting and not pod.start_budget_spent and quota_ns > 0 and pod.debt_ns < STEP_NS


def _short_us(quota_ns: int, pod: Pod, hardware: HardwareTraits) -> int:
    return min(timeslice_us(quota_ns, pod, hardware), max(MIN_WORTHWHILE_US, SHORT_SLICE_US // pod.busy_tsgs))


def _debt_corrected_quota(quota_ns: int, pod: Pod, period_ns: int) -> int:
    return debt_corrected(quota_ns, pod.debt_ns, period_ns) if 0 < quota_ns < period_ns else quota_ns


def _fit_into_period(lengths: list[int], quotas: list[int], period_ns: int) -> list[int]:
    """Shorten windows if they add up to more than a period: first those of pods that are owed nothing, within bounds.

    What is still too long then, all windows bear in proportion to what they have beyond half of their quotas.
    """
    spare = [
        max(0, length - round((1 - MAX_SHORTER) * quota)) if length <= quota else 0
        for length, quota in zip(lengths, quotas, strict=True)
    ]
    cuts = split(min(sum(spare), max(0, sum(lengths) - period_ns)), spare)
    shorter = [length - cut for length, cut in zip(lengths, cuts, strict=True)]
    return shortened_to(period_ns, shorter, quotas)
