"""Copies: share the copy engines in the same ratio as compute, on top of any policy.

A copy engine serves its copy TSGs in turns, as the compute engine serves compute TSGs. So the ratio of their timeslices
is the ratio of their copies. A switch between copies has no measurable cost, so slices are short.

Properties:
- Pods of one class that copy share the copy engines in the ratio of the plan's weights, or of quotas where the plan has
  no weights.
- The slices of a pod's processes add up to 2 ms on average over its class, or to more where a slice would be too short.
- Beside online pods, offline pods get the shortest slices that keep their ratio. Each online slice is at least 20 times
  as long as any offline slice.
- Nothing else in a plan changes, and a pod that copies alone is not slowed down.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from qgpu.model import MAX_TIMESLICE_US, Plan, Pod, PodPlan, Policy, Snapshot

#: Sum of the slices of a pod's processes, on average over its class, in µs. A copy waits no longer than that for the
#: copies of one other pod.
MEAN_US = 2_000

#: The shortest slice, in µs.
LEAST_US = 500

#: An online slice is at least this many times as long as an offline slice.
ONLINE_TIMES = 20

#: A pod in a plan: whether it is online, whether it is on the GPU, its quota in per cent, its number of processes.
_Shape = tuple[bool, bool, int, int]


def share_copy_engines(policy: Policy) -> Policy:
    """Compose a policy that shares the copy engines as ``policy`` shares compute."""

    def plan(snapshot: Snapshot) -> Plan:
        made = policy(snapshot)
        if not snapshot.gang_turns:
            return with_copies(made, snapshot)
        # While gangs have turns, the weight of a busy pod is a time and that of an idle pod is not; idle pods may copy
        # too.
        own = {part.pod: part.copy_timeslice_us for part in plan(replace(snapshot, gang_turns=())).pods}
        return replace(made, pods=tuple([replace(part, copy_timeslice_us=own[part.pod]) for part in made.pods]))

    return plan


def with_copies(plan: Plan, snapshot: Snapshot) -> Plan:
    """Give each pod of a plan its copy slice; the snapshot is the one that the plan was made for."""
    shape_of = {pod.name: _shape(pod) for pod in snapshot.pods}
    shapes = tuple([shape_of[part.pod] for part in plan.pods])
    return replace(plan, pods=_with_slices(plan.pods, shapes))


def _shape(pod: Pod) -> _Shape:
    """Count one process for each busy compute TSG, because copy TSGs are not observed."""
    return pod.online, bool(pod.tsgs), pod.grant.cores or 1, pod.busy_tsgs


@lru_cache(maxsize=64)
def _with_slices(parts: tuple[PodPlan, ...], shapes: tuple[_Shape, ...]) -> tuple[PodPlan, ...]:
    """Set every pod's slice. The result is cached, because every tick asks the same question."""
    online = [own for own, *_ in shapes]
    offline_us, online_us = _in_ratio(parts, shapes, online=False), _in_ratio(parts, shapes, online=True)
    if len({own for own, present, *_ in shapes if present}) > 1:
        offline_slices = _scaled(offline_us, LEAST_US / min(offline_us), MAX_TIMESLICE_US // ONLINE_TIMES)
        online_slices = _scaled(
            online_us, max(1.0, ONLINE_TIMES * max(offline_slices) / min(online_us)), MAX_TIMESLICE_US
        )
    else:
        offline_slices, online_slices = (
            _scaled(each, max(1.0, LEAST_US / min(each, default=LEAST_US)), MAX_TIMESLICE_US)
            for each in (offline_us, online_us)
        )
    left = {False: iter(offline_slices), True: iter(online_slices)}
    return tuple([replace(part, copy_timeslice_us=next(left[own])) for part, own in zip(parts, online, strict=True)])


def _in_ratio(parts: tuple[PodPlan, ...], shapes: tuple[_Shape, ...], *, online: bool) -> list[float]:
    """Divide the copy time of one class by weight, then each pod's part among its processes; in µs."""
    own = [(part.weight, shape) for part, shape in zip(parts, shapes, strict=True) if shape[0] is online]
    weights = [weight for weight, _ in own]
    if not any(weights):
        weights = [quota for _, (_, _, quota, _) in own]
    least = min((weight for weight in weights if weight), default=1)  # for a pod that no policy has weighed yet
    weights = [weight or least for weight in weights]
    whole_us = MEAN_US * len(own)
    return [
        whole_us * weight / sum(weights) / processes
        for weight, (_, (_, _, _, processes)) in zip(weights, own, strict=True)
    ]


def _scaled(slices_us: list[float], times: float, most_us: int) -> list[int]:
    return [min(most_us, max(LEAST_US, round(us * times))) for us in slices_us]
