"""Whom the daemon does not listen to: pods. Being root in one makes no difference.

The kernel vouches for the peer's process (SO_PEERCRED), and a process is in the cgroup of its pod. One that has ended,
or whose number this PID namespace does not show, cannot be told from a pod's, so it is not heard either.
"""

from __future__ import annotations

from collections.abc import Iterable

from qgpu import cgroup
from qgpu.errors import PermissionDeniedError
from qgpu.sched.backend import PodInfo


def refuse_pods(pid: int, pods: Iterable[PodInfo]) -> None:
    """Raise PermissionDeniedError when a peer's process is in a pod. Without pods in cgroups nobody is asked."""
    places = {pod.cgroup: pod.name for pod in pods if pod.cgroup}
    if not places:
        return
    try:
        path = cgroup.of(pid)
    except OSError:
        raise PermissionDeniedError(f"process {pid}: it has ended, or is not to be seen from here") from None
    for place, name in places.items():
        if cgroup.within(path, place):
            raise PermissionDeniedError(f"process {pid}: it is in pod {name}; pods may not talk to qgpud")
