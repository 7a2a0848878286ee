"""How a process becomes a pod between fork and exec, on each plane.

``qgpuctl run`` calls this in the child. Only the filter, the cgroup and a few environment variables remain in the pod.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def enter(plane: str) -> list[int]:
    """Prepare the calling process; return the descriptors that ``pod.attach`` sends to the host.

    Raises NotSupportedError if the kernel lacks what the plane needs. The caller must not start the command then.
    """
    if plane == "seccomp":
        from qgpu.guardian.proxy import seccomp_filter as pod_filter

        return [pod_filter.install()]
    return []


def environment(plane: str, pod: str, uuids: Sequence[str], runtime_dir: Path) -> dict[str, str]:
    """Return the variables that a pod's command gets in addition to the inherited ones."""
    variables = {"QGPU_POD": pod, "QGPU_PLANE": plane}
    if plane == "sim":
        # Hide real GPUs: nothing would hold the pod to its limits on them.
        variables |= {"QGPU_RUNTIME_DIR": str(runtime_dir), "CUDA_VISIBLE_DEVICES": ""}
    else:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)
    return variables
