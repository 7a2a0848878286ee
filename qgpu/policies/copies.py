"""Copies: the copy engines in the same shares as compute, on top of any policy.

The hardware takes turns among the copy TSGs of a copy engine as it does among compute TSGs, so the ratio of their
timeslices is the ratio of copies. A switch costs nothing that can be measured, so slices are short.

Properties:
- Among pods of a class that copy, copies are in the ratio of the plan's weights; of quotas where the plan has none.
- The slices of a pod's processes add up to 2 ms in the mean of its class, to more where one would be too short.
- Beside online pods offline pods have the shortest slices that keep their ratio, and each online slice is at least
  20 times as long as any of them.
- Nothing else of a plan changes, and a pod that copies alone is held back by nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from qgpu.model import MAX_TIMESLICE_US, Plan, Pod, PodPlan, Policy, Snapshot

#: What the slices of a pod's processes add up to, in the mean of its class, in µs: a copy waits no longer for others.
MEAN_US = 2_000

#: The shortest slice, in µs.
LEAST_US = 500

#: How many times as long as an offline slice an online one is.
ONLINE_TIMES = 20

#: Of a pod in a plan: whether it is online, whether it is on the GPU, its quota in per cent, its processes.
_Shape = tuple[bool, bool, int, int]


def copies_shared(policy: Policy) -> Policy:
    """Compose a policy that shares the copy engines as ``policy`` shares compute."""

    def plan(snapshot: Snapshot) -> Plan:
        made = policy(snapshot)
        if not snapshot.turns:
            return with_copies(made, snapshot)
        # With turns of gangs the weights of busy pods are times and those of idle ones, which may copy, are not.
        own = {part.pod: part.copy_timeslice_us for part in plan(replace(snapshot, turns=())).pods}
        return replace(made, pods=tuple([replace(part, copy_timeslice_us=own[part.pod]) for part in made.pods]))

    return plan


def with_copies(plan: Plan, snapshot: Snapshot) -> Plan:
    """Give each pod of a plan its copy slice; the snapshot is the one that the plan was made for."""
    pods = {pod.name: pod for pod in snapshot.pods}
    shapes = tuple([_shape(pods[part.pod]) for part in plan.pods])
    return replace(plan, pods=_with_slices(plan.pods, shapes))


def _shape(pod: Pod) -> _Shape:
    """Count a process for each busy compute TSG: of copy TSGs nothing is known."""
    return pod.online, bool(pod.tsgs), pod.grant.cores or 1, pod.busy_tsgs


@lru_cache(maxsize=64)
def _with_slices(parts: tuple[PodPlan, ...], shapes: tuple[_Shape, ...]) -> tuple[PodPlan, ...]:
    """Set every pod's slice; every tick asks the same."""
    online = [own for own, *_ in shapes]
    offline_us, online_us = _in_ratio(parts, shapes, online=False), _in_ratio(parts, shapes, online=True)
    if len({own for own, present, *_ in shapes if present}) > 1:
        behind = _scaled(offline_us, LEAST_US / min(offline_us), MAX_TIMESLICE_US // ONLINE_TIMES)
        ahead = _scaled(online_us, max(1.0, ONLINE_TIMES * max(behind) / min(online_us)), MAX_TIMESLICE_US)
    else:
        behind, ahead = (
            _scaled(each, max(1.0, LEAST_US / min(each, default=LEAST_US)), MAX_TIMESLICE_US)
            for each in (offline_us, online_us)
        )
    left = {False: iter(behind), True: iter(ahead)}
    return tuple([replace(part, copy_timeslice_us=next(left[own])) for part, own in zip(parts, online, strict=True)])


def _in_ratio(parts: tuple[PodPlan, ...], shapes: tuple[_Shape, ...], *, online: bool) -> list[float]:
    """Divide by weight what the pods of one class have in the mean, and a pod's part among its processes; in µs."""
    own = [(part.weight, shape) for part, shape in zip(parts, shapes, strict=True) if shape[0] is online]
    weights = [weight for weight, _ in own]
    if not any(weights):
        weights = [quota for _, (_, _, quota, _) in own]
    least = min((weight for weight in weights if weight), default=1)  # for who has come before a policy weighed it
    weights = [weight or least for weight in weights]
    whole_us = MEAN_US * len(own)
    return [
        whole_us * weight / sum(weights) / processes
        for weight, (_, (_, _, _, processes)) in zip(weights, own, strict=True)
    ]


def _scaled(slices_us: list[float], times: float, most_us: int) -> list[int]:
    return [min(most_us, max(LEAST_US, round(us * times))) for us in slices_us]
