"""qgpu's metrics under HAMi's names, so that HAMi's dashboards show qgpu's hosts. HAMi's "ratios" are 0 to 100."""

from __future__ import annotations

from collections.abc import Iterable

from qgpu.metrics.text import Family, Kind
from qgpu.metrics.view import GpuView, PodOnGpuView, View

_G = Kind.GAUGE


def families(view: View) -> Iterable[Family]:
    """Return HAMi's series for one view."""
    limit = Family("hami_gpu_memory_limit_bytes", _G, "The card's memory.")
    allocated = Family("hami_gpu_memory_allocated_bytes", _G, "Memory limits of all pods, added up.")
    shared = Family("hami_gpu_shared_count", _G, "Pods on the card.")
    cores = Family("hami_gpu_core_allocated_ratio", _G, "Quotas of all pods, added up, in per cent.")
    node = Family("hami_node_gpu_memory_allocated_ratio", _G, "The allocated part of the card's memory, in per cent.")
    host_used = Family("hami_host_gpu_memory_used_bytes", _G, "Memory that pods hold.")
    host_busy = Family("hami_host_gpu_utilization_ratio", _G, "GPU time of all pods over the last 2 s, in per cent.")
    used = Family("hami_vgpu_memory_used_bytes", _G, "Memory that a pod holds.")
    pod_limit = Family("hami_vgpu_memory_limit_bytes", _G, "A pod's memory limit, or the card's memory without one.")
    busy = Family("hami_container_device_utilization_ratio", _G, "A pod's GPU time over the last 2 s, in per cent.")
    for gpu in view.gpus:
        card = _card(view, gpu)
        limit.add(gpu.pgpu.memory, **card)
        allocated.add(gpu.memory_granted, **card)
        shared.add(len(gpu.pods), **card)
        cores.add(gpu.cores_granted, **card)
        node.add(100 * gpu.memory_granted / gpu.pgpu.memory if gpu.pgpu.memory else 0.0, **card)
        host_used.add(gpu.memory_held, **card)
        host_busy.add(100 * sum(pod.share for pod in gpu.pods), **card)
        for pod in gpu.pods:
            labels = _pod(view, gpu, pod)
            used.add(pod.memory, **labels)
            pod_limit.add(pod.grant.memory or gpu.pgpu.memory, **labels)
            busy.add(100 * pod.share, **labels)
    return limit, allocated, shared, cores, node, host_used, host_busy, used, pod_limit, busy


def _card(view: View, gpu: GpuView) -> dict[str, str]:
    return {
        "node": view.node,
        "device_uuid": gpu.pgpu.uuid,
        "device_index": str(gpu.pgpu.index),
        "device_type": gpu.pgpu.name,
    }


def _pod(view: View, gpu: GpuView, pod: PodOnGpuView) -> dict[str, str]:
    return {
        "node": view.node,
        "namespace": pod.labels.namespace,
        "pod": pod.labels.pod or pod.pod,
        "container": pod.labels.container,
        "vdevice_index": "0",
        "device_uuid": gpu.pgpu.uuid,
    }
