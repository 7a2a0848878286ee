"""Whom the daemon does not listen to: pods. Being root in one makes no difference.

The kernel vouches for the peer's process (SO_PEERCRED), and a process is in the cgroup of its pod. One that has ended,
or whose number this PID namespace does not show, cannot be told from a pod's, so it is not heard either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qgpu.errors import PermissionDeniedError
from qgpu.ipc.wire import has_ended
from qgpu.linux import cgroup
from qgpu.model.plane_api import PodInfo

#: In place of a pod's name, for who cannot be told from a pod's process.
UNKNOWN = "?"


def pod_of(pid: int, process: int | None, places: Mapping[str, str]) -> str:
    """Return the pod that a peer's process is in, by the pods' cgroups; empty for none. Without pods nobody is asked.

    ``process`` is its pidfd: that of one that has ended and left its connection to another tells of nobody.
    """
    if not places:
        return ""
    try:
        path = cgroup.of(pid)
        gone = process is None or has_ended(process)  # after the look: it was at this process then
    except OSError:
        gone = True
    if gone:
        return UNKNOWN
    return next((name for place, name in places.items() if cgroup.within(path, place)), "")


def places_of(pods: Iterable[PodInfo]) -> dict[str, str]:
    """Return the pods that have cgroups, by these."""
    return {pod.cgroup: pod.name for pod in pods if pod.cgroup}


def refuse_pods(pid: int, process: int | None, pods: Iterable[PodInfo]) -> None:
    """Raise PermissionDeniedError when a peer's process is in a pod."""
    name = pod_of(pid, process, places_of(pods))
    if name == UNKNOWN:
        raise PermissionDeniedError(f"process {pid}: it has ended, or is not to be seen from here")
    if name:
        raise PermissionDeniedError(f"process {pid}: it is in pod {name}; pods may not talk to qgpud")
