"""Messages about pods that hold more memory than their limit, which happens when a limit is lowered."""

from __future__ import annotations

from qgpu.model.plane_api import PodInfo
from qgpu.units import format_memory


def over_limits(pod: PodInfo) -> list[str]:
    """Return one message for each pGPU on which the pod is over its memory limit."""
    return [
        f"holds {format_memory(held)} on pGPU {index}, {format_memory(held - grant.memory)} over its limit: "
        "it keeps that, and gets no more until it is below"
        for index, grant in pod.grants.items()
        if grant.memory is not None and (held := pod.memory.get(index, 0)) > grant.memory
    ]
