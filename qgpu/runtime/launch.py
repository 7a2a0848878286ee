"""Becoming a pod: what a process does to itself, between fork and exec, on each plane.

``qgpuctl run`` calls this in the child; nothing of it is left in the pod but the filter, its cgroup and a
few environment variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def enter(plane: str) -> list[int]:
    """Prepare the calling process; return the descriptors the host needs with pod.attach.

    Raises NotSupportedError when the kernel lacks what the plane needs; the command must not be started then.
    """
    if plane == "seccomp":
        from qgpu.guardian.proxy import seccomp_filter as pod_filter

        return [pod_filter.install()]
    return []


def environment(plane: str, pod: str, uuids: Sequence[str], runtime_dir: Path) -> dict[str, str]:
    """Return the variables a pod's command starts with, beside what it inherits."""
    variables = {"QGPU_POD": pod, "QGPU_PLANE": plane}
    if plane == "sim":
        # A real GPU that is there all the same is not this pod's: nobody would hold it to its limits.
        variables |= {"QGPU_RUNTIME_DIR": str(runtime_dir), "CUDA_VISIBLE_DEVICES": ""}
    else:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)
    return variables
