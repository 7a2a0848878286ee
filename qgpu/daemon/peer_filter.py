"""Refuses requests from pods, even from root in a pod.

The kernel names the peer's process (SO_PEERCRED), and the process is in its pod's cgroup. A process that has ended, or
that this PID namespace does not show, could be a pod's, so it is refused as well. slurmstepd is no pod's process,
although its cgroup lies in that of the job, which is the pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qgpu.errors import PermissionDeniedError
from qgpu.ipc.wire import has_ended
from qgpu.linux import cgroup
from qgpu.model.plane_api import PodInfo
from qgpu.runtime.agent import UNKNOWN
from qgpu.slurm.job import is_slurmstepd


def pod_of(pid: int, process: int | None, by_cgroup: Mapping[str, str], *, root: bool = False) -> str:
    """Return the pod that a peer's process is in, by the pods' cgroups; empty for none.

    ``process`` is the peer's pidfd. If that process has ended, another process may have inherited the connection: the
    result is UNKNOWN. Without any pods there is no check. ``root`` says that the peer was root when it connected.
    """
    if not by_cgroup:
        return ""
    try:
        path = cgroup.of(pid)
        gone = process is None or has_ended(process)  # checked last: alive now, so the pid was not reused before
    except OSError:
        gone = True
    if gone:
        return UNKNOWN
    for place, name in by_cgroup.items():
        if cgroup.within(path, place):
            return "" if root and is_slurmstepd(path, place) else name
    return ""


def pods_by_cgroup(pods: Iterable[PodInfo]) -> dict[str, str]:
    """Return the pods that have cgroups, by cgroup."""
    return {at: pod.name for pod in pods for at in pod.cgroups}


def refuse_pods(pid: int, process: int | None, by_cgroup: Mapping[str, str], *, root: bool = False) -> None:
    """Raise PermissionDeniedError if a peer's process is in a pod, or may be."""
    name = pod_of(pid, process, by_cgroup, root=root)
    if name == UNKNOWN:
        raise PermissionDeniedError(f"process {pid}: it has ended, or is not visible from here")
    if name:
        raise PermissionDeniedError(f"process {pid}: it is in pod {name}; pods may not talk to qgpud")
