"""The native series: base units, ratios 0 to 1, counters where possible. Unknown values are left out.

Labels of a card have the names of DCGM's exporter (``gpu``, ``UUID``), so that joins on UUID are easy. A series about
a pod on a pGPU has the labels of both. ``pod`` is the pod's name in qgpu; a Kubernetes container has labels for its
names there as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from qgpu.metrics.text import Family, Kind
from qgpu.metrics.view import GpuView, PodMoves, PodOnGpuView, PodView, View
from qgpu.model import NS_PER_S
from qgpu.model.container_labels import ContainerLabels

_T = TypeVar("_T")


class _Labelled(NamedTuple):
    """A value with labels beyond those of what it is about."""

    value: float | None
    labels: dict[str, str]


#: A series: its name and kind, its meaning, and its values for one card, pod or host; None if unknown.
_Row = tuple[str, Kind, str, Callable[[_T], float | list[_Labelled] | None]]

_G, _C = Kind.GAUGE, Kind.COUNTER

_HOST: list[_Row[View]] = [
    ("qgpu_build_info", _G, "Versions and plane of the daemon, as labels.",
     lambda host: _info(plane=host.plane, driver=host.driver or "", version=host.version)),
    ("qgpu_uptime_seconds", _G, "Time since the daemon started.", lambda host: host.uptime_s),
    ("qgpu_traces", _G, "Recordings in progress.", lambda host: host.traces),
]  # fmt: skip

_DEVICE_FILES: list[_Row[View]] = [
    ("qgpu_device_files_enforced", _G, "1 while only a pod's own processes can use device files that it opened.",
     lambda host: None if host.isolated is None else int(host.isolated)),
    ("qgpu_device_files_refused_total", _C, "Refused uses of a pod's device file from outside the pod.",
     lambda host: [_Labelled(count, {"call": call}) for call, count in host.isolation_refused.items()]),
]  # fmt: skip

_CARD: list[_Row[GpuView]] = [
    ("qgpu_gpu_info", _G, "A pGPU and how it is shared, as labels.",
     lambda gpu: _info(modelName=gpu.pgpu.name, policy=gpu.policy, online_policy=gpu.online_policy)),
    ("qgpu_gpu_period_seconds", _G, "The scheduling period.", lambda gpu: gpu.period_ns / NS_PER_S),
    ("qgpu_gpu_memory_total_bytes", _G, "The card's memory.", lambda gpu: gpu.pgpu.memory),
    ("qgpu_gpu_memory_allocated_bytes", _G, "Memory limits of all pods, added up.", lambda gpu: gpu.memory_granted),
    ("qgpu_gpu_memory_used_bytes", _G, "Memory that pods hold; what runs without qgpu is not in it.",
     lambda gpu: gpu.memory_held),
    ("qgpu_gpu_cores_allocated_ratio", _G, "Quotas of all pods, added up.", lambda gpu: gpu.cores_granted / 100),
    ("qgpu_gpu_memory_overcommit_ratio", _G, "How many times its memory may be granted.",
     lambda gpu: gpu.memory_overcommit),
    ("qgpu_gpu_memory_yielded_bytes", _G, "Memory of pods that yielded it to others, now in host memory.",
     lambda gpu: gpu.memory_yielded),
    ("qgpu_gpu_memory_shortage_bytes", _G, "Memory still to be made free for the limits of pods on it.",
     lambda gpu: gpu.memory_shortage),
    ("qgpu_gpu_memory_prepared_bytes", _G, "Memory that Kubernetes claims hold, used by a pod or not.",
     lambda gpu: gpu.memory_prepared),
    ("qgpu_gpu_cores_prepared_ratio", _G, "Quotas that Kubernetes claims hold, used by a pod or not.",
     lambda gpu: gpu.cores_prepared / 100),
    ("qgpu_gpu_ticks_total", _C, "Ticks of the scheduling loop.", lambda gpu: gpu.ticks),
    ("qgpu_gpu_plans_total", _C, "Changes of the plan in force.", lambda gpu: gpu.plans),
    ("qgpu_gpu_plan_gated", _G, "1 while the plan in force moves gates.", lambda gpu: int(gpu.gated)),
    ("qgpu_gpu_problem", _G, "1 while the plane fails on this pGPU; its pods then run ungated.",
     lambda gpu: int(bool(gpu.problem))),
    ("qgpu_gpu_utilization_ratio", _G, "NVML's utilization: any kernel ran; absent if not known.",
     lambda gpu: gpu.utilization),
    ("qgpu_gpu_engine_active_ratio", _G, "GPU time of all pods over the last seconds.", lambda gpu: gpu.engine_active),
    ("qgpu_gpu_unmanaged_processes", _G, "Processes on the card that are in no pod; absent if not known.",
     lambda gpu: gpu.unmanaged),
]  # fmt: skip

_POD_ON_CARD: list[_Row[PodOnGpuView]] = [
    ("qgpu_pod_info", _G, "A pod's grant on a pGPU, as labels.",
     lambda pod: _info(**{"class": pod.grant.pod_class.value})),
    ("qgpu_pod_gpu_seconds_total", _C, "True GPU time, from the hardware's context switches.",
     lambda pod: pod.used_ns / NS_PER_S),
    ("qgpu_pod_throttled_seconds_total", _C, "Time that its gate was closed.",
     lambda pod: pod.counted.gated_ns / NS_PER_S),
    ("qgpu_pod_switches_total", _C, "How often it was switched in.", lambda pod: pod.counted.starts),
    ("qgpu_pod_switch_seconds_total", _C, "Time that switches to it and away took, estimated for the card's model.",
     lambda pod: pod.switch_ns / NS_PER_S),
    ("qgpu_pod_preemptions_total", _C, "Direct switches from an offline to an online pod, by or of this pod.",
     lambda pod: [_Labelled(pod.counted.preempting, {"role": "by"}), _Labelled(pod.counted.preempted, {"role": "of"})]),
    ("qgpu_pod_below_quota", _G, "1 while it gets less than its quota, and the kind of reason.",
     lambda pod: _info(reason=pod.below_quota.split()[0].rstrip(":")) if pod.below_quota else None),
    ("qgpu_pod_cores_quota_ratio", _G, "Its quota; absent without one.",
     lambda pod: None if pod.grant.cores is None else pod.grant.cores / 100),
    ("qgpu_pod_latency_target_seconds", _G, "Its latency target; absent without one.",
     lambda pod: _seconds(pod.grant.latency_target_ns)),
    ("qgpu_pod_expected_wait_p99_seconds", _G,
     "What sharing should add to an online pod's p99, by its card's measured table; absent if unknown.",
     lambda pod: _seconds(pod.expected_wait_p99_ns)),
    ("qgpu_pod_debt_seconds", _G, "GPU time beyond (positive) or short of what plans aimed at.",
     lambda pod: pod.debt_ns / NS_PER_S),
    ("qgpu_pod_busy", _G, "1 if it had work lately.", lambda pod: int(pod.busy)),
    ("qgpu_pod_memory_limit_bytes", _G, "Its memory limit; absent without one.", lambda pod: pod.grant.memory),
    ("qgpu_pod_memory_used_bytes", _G, "Memory it holds.", lambda pod: pod.memory),
]  # fmt: skip

_POD: list[_Row[PodView]] = [
    ("qgpu_pod_memory_denied_total", _C, "Allocations refused because of its memory limit.",
     lambda pod: pod.refused_memory),
    ("qgpu_pod_calls_denied_total", _C, "Driver calls refused that would have changed its share.",
     lambda pod: pod.refused_calls),
    ("qgpu_pod_suspended", _G, "1 while the pod is off its cards.", lambda pod: int(pod.suspended)),
    ("qgpu_pod_suspended_bytes", _G, "Its card memory that lies in host memory while it is suspended.",
     lambda pod: pod.suspended_memory),
    ("qgpu_pod_waits_for_memory", _G, "1 while it waits for room on its card, to begin or to come back.",
     lambda pod: int(pod.waits_for_memory)),
    ("qgpu_pod_moves_total", _C, "Moves off its cards and back, and failed ones.",
     lambda pod: _by_direction(pod, lambda moves: moves.count)),
    ("qgpu_pod_move_seconds_total", _C, "Time that moves took.",
     lambda pod: _by_direction(pod, lambda moves: moves.seconds, failed=False)),
    ("qgpu_pod_moved_bytes_total", _C, "Memory that was moved.",
     lambda pod: _by_direction(pod, lambda moves: moves.bytes, failed=False)),
]  # fmt: skip


def families(view: View) -> Iterable[Family]:
    """Return all native series for one view."""
    cards = [(gpu, _card(gpu)) for gpu in view.gpus]
    on_cards = [(pod, card | _pod(pod)) for gpu, card in cards for pod in gpu.pods]
    yield from _fill(_HOST, [(view, {})])
    yield from _fill(_CARD, cards)
    yield from _fill(_POD_ON_CARD, on_cards)
    yield from _fill(_POD, [(pod, _pod(pod)) for pod in view.pods.values()])
    yield from _fill(_DEVICE_FILES, [(view, {})])


def _fill(rows: list[_Row[_T]], about: list[tuple[_T, dict[str, str]]]) -> Iterator[Family]:
    for name, kind, text, value_of in rows:
        family = Family(name, kind, text)
        for each, labels in about:
            found = value_of(each)
            for value, more in found if isinstance(found, list) else [_Labelled(found, {})]:
                if value is not None:
                    family.add(value, **labels, **more)
        yield family


def _info(**labels: str) -> list[_Labelled]:
    return [_Labelled(1, labels)]


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / NS_PER_S


def _by_direction(pod: PodView, value: Callable[[PodMoves], float], *, failed: bool = True) -> list[_Labelled]:
    shown = [moves for moves in pod.moves if failed or moves.direction != "failed"]
    return [_Labelled(value(moves), {"direction": moves.direction}) for moves in shown]


def _card(gpu: GpuView) -> dict[str, str]:
    return {"gpu": str(gpu.pgpu.index), "UUID": gpu.pgpu.uuid}


def _pod(pod: PodView | PodOnGpuView) -> dict[str, str]:
    return {"pod": pod.pod} | _kubernetes(pod.labels)


def _kubernetes(labels: ContainerLabels) -> dict[str, str]:
    """Return a container's labels; none for a pod that is no Kubernetes container, which Prometheus reads as empty."""
    named = {
        "namespace": labels.namespace,
        "kubernetes_pod": labels.pod,
        "container": labels.container,
        "claim": labels.claim,
    }
    return named if any(named.values()) else {}
