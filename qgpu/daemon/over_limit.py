"""Pods that hold more memory than they were granted, as happens when a limit is lowered: what to say of them."""

from __future__ import annotations

from qgpu.model.plane_api import PodInfo
from qgpu.units import format_memory


def over_limits(pod: PodInfo) -> list[str]:
    """Say for each pGPU where a pod is over its limit what that means for it."""
    return [
        f"holds {format_memory(held)} on pGPU {index}, {format_memory(held - grant.memory)} over its limit: "
        "it keeps that, and is given nothing more until it is below"
        for index, grant in pod.grants.items()
        if grant.memory is not None and (held := pod.memory.get(index, 0)) > grant.memory
    ]
