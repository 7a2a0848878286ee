"""Whom the daemon does not listen to: pods. Being root in one makes no difference.

The kernel vouches for the peer's process (SO_PEERCRED), and a process is in the cgroup of its pod. One that has ended,
or whose number this PID namespace does not show, cannot be told from a pod's, so it is not heard either.
"""

from __future__ import annotations

from collections.abc import Iterable

from qgpu import cgroup
from qgpu.errors import PermissionDeniedError
from qgpu.sched.backend import PodInfo
from qgpu.wire import has_ended


def refuse_pods(pid: int, process: int | None, pods: Iterable[PodInfo]) -> None:
    """Raise PermissionDeniedError when a peer's process is in a pod. Without pods in cgroups nobody is asked.

    ``process`` is its pidfd: that of one that has ended and left its connection to another tells of nobody.
    """
    places = {pod.cgroup: pod.name for pod in pods if pod.cgroup}
    if not places:
        return
    try:
        path = cgroup.of(pid)
        gone = process is None or has_ended(process)  # after the look: it was at this process then
    except OSError:
        gone = True
    if gone:
        raise PermissionDeniedError(f"process {pid}: it has ended, or is not to be seen from here")
    for place, name in places.items():
        if cgroup.within(path, place):
            raise PermissionDeniedError(f"process {pid}: it is in pod {name}; pods may not talk to qgpud")
