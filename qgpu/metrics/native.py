"""The native series: base units, ratios 0 to 1, counters where possible. Unknown values are left out.

Labels of a card have the names of DCGM's exporter (``gpu``, ``UUID``), so that joins on UUID are easy. A series about
a pod on a pGPU has the labels of both. ``pod`` is the pod's name in qgpu; a Kubernetes container has labels for its
names there as well.
"""

from __future__ import annotations

from collections.abc import Iterable

from qgpu.metrics.text import Family, Kind
from qgpu.metrics.view import GpuView, PodOnGpuView, PodView, View
from qgpu.model import NS_PER_S
from qgpu.model.container_labels import ContainerLabels

_G, _C = Kind.GAUGE, Kind.COUNTER


def families(view: View) -> Iterable[Family]:
    """Return all native series for one view."""
    yield _one(
        "qgpu_build_info",
        _G,
        "Versions and plane of the daemon, as labels.",
        1,
        plane=view.plane,
        driver=view.driver or "",
        version=view.version,
    )
    yield _one("qgpu_uptime_seconds", _G, "Time since the daemon started.", view.uptime_s)
    yield _one("qgpu_traces", _G, "Recordings in progress.", view.traces)
    yield from _gpus(view.gpus)
    yield from _pods_on_gpus(view.gpus)
    yield from _refusals(view.pods.values())
    yield from _suspensions(view.pods.values())
    yield from _device_files(view)


def _one(name: str, kind: Kind, text: str, value: float, **labels: str) -> Family:
    family = Family(name, kind, text)
    family.add(value, **labels)
    return family


def _gpus(gpus: Iterable[GpuView]) -> Iterable[Family]:
    info = Family("qgpu_gpu_info", _G, "A pGPU and how it is shared, as labels.")
    period = Family("qgpu_gpu_period_seconds", _G, "The scheduling period.")
    total = Family("qgpu_gpu_memory_total_bytes", _G, "The card's memory.")
    allocated = Family("qgpu_gpu_memory_allocated_bytes", _G, "Memory limits of all pods, added up.")
    used = Family("qgpu_gpu_memory_used_bytes", _G, "Memory that pods hold; what runs without qgpu is not in it.")
    overcommit = Family("qgpu_gpu_memory_overcommit_ratio", _G, "How many times its memory may be granted.")
    away = Family("qgpu_gpu_memory_yielded_bytes", _G, "Memory of pods that yielded it to others, now in host memory.")
    cores = Family("qgpu_gpu_cores_allocated_ratio", _G, "Quotas of all pods, added up.")
    memory_prepared = Family(
        "qgpu_gpu_memory_prepared_bytes", _G, "Memory that Kubernetes claims hold, used by a pod or not."
    )
    cores_prepared = Family(
        "qgpu_gpu_cores_prepared_ratio", _G, "Quotas that Kubernetes claims hold, used by a pod or not."
    )
    ticks = Family("qgpu_gpu_ticks_total", _C, "Ticks of the scheduling loop.")
    plans = Family("qgpu_gpu_plans_total", _C, "Changes of the plan in force.")
    gated = Family("qgpu_gpu_plan_gated", _G, "1 while the plan in force moves gates.")
    problem = Family("qgpu_gpu_problem", _G, "1 while the plane fails on this pGPU; its pods then run ungated.")
    used_part = Family("qgpu_gpu_utilization_ratio", _G, "NVML's utilisation: any kernel ran; absent if not known.")
    engine_active = Family("qgpu_gpu_engine_active_ratio", _G, "GPU time of all pods over the last seconds.")
    unmanaged = Family("qgpu_gpu_unmanaged_processes", _G, "Processes on the card in no pod; absent if not known.")
    for gpu in gpus:
        labels = _card(gpu)
        info.add(1, **labels, modelName=gpu.pgpu.name, policy=gpu.policy, online_policy=gpu.online_policy)
        period.add(gpu.period_ns / NS_PER_S, **labels)
        total.add(gpu.pgpu.memory, **labels)
        allocated.add(gpu.memory_granted, **labels)
        used.add(gpu.memory_held, **labels)
        overcommit.add(gpu.memory_overcommit, **labels)
        away.add(gpu.memory_yielded, **labels)
        cores.add(gpu.cores_granted / 100, **labels)
        memory_prepared.add(gpu.memory_prepared, **labels)
        cores_prepared.add(gpu.cores_prepared / 100, **labels)
        ticks.add(gpu.ticks, **labels)
        plans.add(gpu.plans, **labels)
        gated.add(int(gpu.gated), **labels)
        problem.add(int(bool(gpu.problem)), **labels)
        engine_active.add(gpu.engine_active, **labels)
        if gpu.utilization is not None:
            used_part.add(gpu.utilization, **labels)
        if gpu.unmanaged is not None:
            unmanaged.add(gpu.unmanaged, **labels)
    held = overcommit, away, memory_prepared, cores_prepared
    activity = used_part, engine_active
    return info, period, total, allocated, used, cores, *held, ticks, plans, gated, problem, *activity, unmanaged


def _pods_on_gpus(gpus: Iterable[GpuView]) -> Iterable[Family]:
    info = Family("qgpu_pod_info", _G, "A pod's grant on a pGPU, as labels.")
    gpu_s = Family("qgpu_pod_gpu_seconds_total", _C, "True GPU time, from the hardware's context switches.")
    throttled = Family("qgpu_pod_throttled_seconds_total", _C, "Time that its gate was closed.")
    switches = Family("qgpu_pod_switches_total", _C, "How often it was switched in.")
    switching = Family("qgpu_pod_switch_seconds_total", _C, "What these switches took, estimated by the card's model.")
    preemptions = Family(
        "qgpu_pod_preemptions_total", _C, "Direct switches from an offline to an online pod, by or of this pod."
    )
    below = Family("qgpu_pod_below_quota", _G, "1 while it gets less than its quota, and the kind of reason.")
    limit = Family("qgpu_pod_cores_quota_ratio", _G, "Its quota; absent without one.")
    target = Family("qgpu_pod_latency_target_seconds", _G, "Its latency target; absent without one.")
    wait = Family(
        "qgpu_pod_expected_wait_p99_seconds",
        _G,
        "What sharing should add to an online pod's p99, by its card's measured table; absent if unknown.",
    )
    debt = Family("qgpu_pod_debt_seconds", _G, "GPU time beyond (positive) or short of what plans aimed at.")
    busy = Family("qgpu_pod_busy", _G, "1 if it had work lately.")
    memory_limit = Family("qgpu_pod_memory_limit_bytes", _G, "Its memory limit; absent without one.")
    memory_used = Family("qgpu_pod_memory_used_bytes", _G, "Memory it holds.")
    for gpu in gpus:
        for pod in gpu.pods:
            labels = _labels(gpu, pod)
            grant = pod.grant
            info.add(1, **labels, **{"class": grant.pod_class.value})
            gpu_s.add(pod.used_ns / NS_PER_S, **labels)
            throttled.add(pod.counted.gated_ns / NS_PER_S, **labels)
            switches.add(pod.counted.starts, **labels)
            switching.add(pod.switch_ns / NS_PER_S, **labels)
            if pod.below_quota:
                below.add(1, **labels, reason=pod.below_quota.split()[0].rstrip(":"))
            for role, count in (("by", pod.counted.preempting), ("of", pod.counted.preempted)):
                if count is not None:
                    preemptions.add(count, **labels, role=role)
            debt.add(pod.debt_ns / NS_PER_S, **labels)
            busy.add(int(pod.busy), **labels)
            memory_used.add(pod.memory, **labels)
            if grant.cores is not None:
                limit.add(grant.cores / 100, **labels)
            if grant.memory is not None:
                memory_limit.add(grant.memory, **labels)
            if pod.expected_wait_p99_ns is not None:
                wait.add(pod.expected_wait_p99_ns / NS_PER_S, **labels)
            if grant.latency_target_ns is not None:
                target.add(grant.latency_target_ns / NS_PER_S, **labels)
    time = gpu_s, throttled, switches, switching, preemptions
    return info, *time, below, limit, target, wait, debt, busy, memory_limit, memory_used


def _refusals(pods: Iterable[PodView]) -> Iterable[Family]:
    memory = Family("qgpu_pod_memory_denied_total", _C, "Allocations refused because of its memory limit.")
    calls = Family("qgpu_pod_calls_denied_total", _C, "Driver calls refused that would have changed its share.")
    for pod in pods:
        if pod.refused_memory is not None:
            memory.add(pod.refused_memory, pod=pod.pod, **_kubernetes(pod.labels))
        if pod.refused_calls is not None:
            calls.add(pod.refused_calls, pod=pod.pod, **_kubernetes(pod.labels))
    return memory, calls


def _suspensions(pods: Iterable[PodView]) -> Iterable[Family]:
    suspended = Family("qgpu_pod_suspended", _G, "1 while the pod is off its cards.")
    held = Family("qgpu_pod_suspended_bytes", _G, "Its card memory that lies in host memory meanwhile.")
    waits = Family("qgpu_pod_waits_for_memory", _G, "1 while it waits for room on its card, to begin or to come back.")
    count = Family("qgpu_pod_moves_total", _C, "Moves off its cards and back, and failed ones.")
    seconds = Family("qgpu_pod_move_seconds_total", _C, "Time that moves took.")
    moved = Family("qgpu_pod_moved_bytes_total", _C, "Memory that was moved.")
    for pod in pods:
        labels = {"pod": pod.pod} | _kubernetes(pod.labels)
        suspended.add(int(pod.suspended), **labels)
        held.add(pod.suspended_memory, **labels)
        waits.add(int(pod.waits_for_memory), **labels)
        for moves in pod.moves:
            count.add(moves.count, **labels, direction=moves.direction)
            if moves.direction != "failed":
                seconds.add(moves.seconds, **labels, direction=moves.direction)
                moved.add(moves.bytes, **labels, direction=moves.direction)
    return suspended, held, waits, count, seconds, moved


def _device_files(view: View) -> Iterable[Family]:
    if view.isolated is None:
        return
    yield _one(
        "qgpu_device_files_enforced", _G, "1 while only pods can use the device files they opened.", int(view.isolated)
    )
    refused = Family("qgpu_device_files_refused_total", _C, "Uses of a pod's device file from outside it, refused.")
    for call, count in view.isolation_refused.items():
        refused.add(count, call=call)
    yield refused


def _card(gpu: GpuView) -> dict[str, str]:
    return {"gpu": str(gpu.pgpu.index), "UUID": gpu.pgpu.uuid}


def _labels(gpu: GpuView, pod: PodOnGpuView) -> dict[str, str]:
    return _card(gpu) | {"pod": pod.pod} | _kubernetes(pod.labels)


def _kubernetes(labels: ContainerLabels) -> dict[str, str]:
    """Return a container's labels; none for a pod that is no Kubernetes container, which Prometheus reads as empty."""
    named = {
        "namespace": labels.namespace,
        "kubernetes_pod": labels.pod,
        "container": labels.container,
        "claim": labels.claim,
    }
    return named if any(named.values()) else {}
