"""Makes pods of containers: handles the request of their hook, and the seccomp listeners of their runtime.

A container without prepared devices gets what it asks for, if that fits. One with prepared devices gets those
(``qgpu/daemon/claim_requests.py``). One with a group's device is a member of that group.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from qgpu.daemon import container_notes
from qgpu.daemon.claim_requests import ClaimRequests
from qgpu.daemon.container_notes import ContainerNote
from qgpu.daemon.pods import Pods
from qgpu.daemon.request_args import Arguments
from qgpu.errors import RefusedError
from qgpu.groups.group_files import GroupFiles
from qgpu.ipc.control_socket import Session
from qgpu.linux import cgroup
from qgpu.model import ContainerPolicy
from qgpu.model.plane_api import PodInfo
from qgpu.runtime import seccomp_profile
from qgpu.runtime.driver_files import Number, nodes_by_pgpu
from qgpu.runtime.oci_container import Container, described

_log = structlog.get_logger("containers")

#: The key of a note at a container's cgroup: which of its devices makes video memory that no limit covers.
_BEYOND = "beyond"


class ContainerRequests:
    """Requests about containers. ``listener`` is the socket for seccomp listeners, on the plane that needs them."""

    def __init__(
        self,
        pods: Pods,
        claims: ClaimRequests,
        policy: ContainerPolicy,
        listener: Path | None,
        groups: Callable[[str], GroupFiles],
    ) -> None:
        """Take ``groups``, which returns the files of a group by its name."""
        self._pods, self._claims, self._policy, self._listener = pods, claims, policy, listener
        self._groups = groups

    def bind(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Make a container a pod before its process starts. The pod ends when the runtime removes its cgroup.

        The same container comes again if its hook had no answer, or has several hooks. It is bound once.
        """
        container = described(arguments.raw, self._policy)
        container.check_new(self._nodes())
        container.check_annotations()
        container.check_mounts()
        if self._listener is not None:
            seccomp_profile.check(container, self._listener)
        devices, group = container.prepared_devices(), container.group()
        at = container.cgroup()
        container.check_alone(at)
        self._claims.await_consumer(container, devices)
        whose = self._claims.owner(container, devices)
        self._pods.await_left(whose)
        if group in self._pods.prepared.by_group:
            raise RefusedError(f"container {container.id}: group {group} is a claim's; name the claim in its pod")
        claimed = self._claims.group_of(container, devices)
        bound = container_notes.note_of(container, devices)
        with self._pods.lock:
            self._pods.check_free(at)
            if group or claimed:
                self._claims.groups.check_open(claimed)
                name = self._join(container, bound, group or claimed, at)
            else:
                self._pods.leave(at)
                for pod in self._pods.listed():
                    if pod.cgroup == at and container_notes.read(pod) == bound:
                        self._pods.users.note_owner(pod.name, at, whose)  # the daemon may have ended before it did
                        return {"name": pod.name}
                name = self._claims.bind(container, bound, at) if devices else self._bind(container, bound, at)
                self._pods.users.note_owner(name, at, whose)
        _log.info("container bound", pod=name, container=container.id, cgroup=at, devices=devices)
        return {"name": name}

    def _join(self, container: Container, bound: ContainerNote, group: str, at: str) -> str:
        """Make a container a member of a group: a part of the group's pod, under its grant. Raises a QgpuError."""
        self._groups(group).need_keeper()  # a pod of that name may be no group, or one of another
        pod = self._pods.named(group)
        container.check_devices(pod.grants.values())
        beyond = set(container.gpus(self._nodes())) - set(pod.grants)
        if beyond:
            raise RefusedError(
                f"container {container.id}: it has pGPU {min(beyond)}, which is not group {group}'s; give it the "
                "group's device alone"
            )
        cgroup.set_xattr(at, _BEYOND, container.beyond_limits())
        container_notes.write(at, bound)
        for last in [each for each in self._pods.listed() if each.cgroup == at]:
            self._pods.retire(last)
        self._pods.join(group, at)
        return group

    def _bind(self, container: Container, bound: ContainerNote, at: str) -> str:
        container.check_devices()
        wanted = container.wanted()
        grants = {index: wanted.on(self._pods.cards[index].memory) for index in container.gpus(self._nodes())}
        cgroup.set_xattr(at, _BEYOND, container.beyond_limits())
        name = self._pods.admit(container.pod, grants, at)
        container_notes.write(at, bound)
        return name

    def _nodes(self) -> dict[int, dict[Number, str]]:
        """Return the device nodes of each pGPU; none on the simulator."""
        return nodes_by_pgpu(self._pods.cards.values())

    def take_listener(self, pid: int, container: str, listener: int) -> None:
        """Attach a container's process, with a copy of its seccomp listener, to its pod. Raises a QgpuError, OSError.

        Some runtimes report pid 0. The pod is then the one whose cgroup path contains the container's id. No runtime
        waits for us, so the process may have ended and its pid may be that of a process in another container.
        """
        with self._pods.lock:
            pod = self._pod_around(pid, container) if pid else self._pod_of_container(container)
            self._pods.host.attach(pod.name, pid or _one_in(pod, container), [os.dup(listener)])

    def _pod_of_container(self, container: str) -> PodInfo:
        for pod in self._pods.listed():
            if container and pod.pids and any(cgroup.is_of_container(each, container) for each in pod.cgroups):
                return pod
        raise RefusedError(f"container {container}: no pod has it")

    def _pod_around(self, pid: int, container: str) -> PodInfo:
        try:
            at = cgroup.of(pid)
        except OSError as error:
            raise RefusedError(f"process {pid}: {error.strerror}") from error
        inside = [(each, pod) for pod in self._pods.listed() for each in pod.cgroups if cgroup.within(at, each)]
        if not inside:
            raise RefusedError(f"process {pid}: its cgroup {at} belongs to no pod")
        own, pod = max(inside, key=lambda found: len(found[0]))
        noted = container_notes.read_at(own)
        if noted is not None and noted.container != container:
            raise RefusedError(
                f"process {pid}: it is in container {noted.container} now, and its listener was sent for {container}; "
                "start it again"
            )
        return pod


def check_reach(pod: PodInfo) -> None:
    """Raise RefusedError if a container reaches a device that makes video memory past any limit."""
    for at in pod.cgroups:
        if (name := cgroup.get_xattr(at, _BEYOND)) is not None:
            raise RefusedError(
                f"pod {pod.name}: its container reaches {name}, which makes video memory that no limit covers; "
                "start it without that device"
            )


def _one_in(pod: PodInfo, container: str) -> int:
    """Return a process of a container in a pod. Raises RefusedError if none is left."""
    inside = [pid for at in pod.cgroups if cgroup.is_of_container(at, container) for pid in cgroup.members(at).pids]
    if not inside:
        raise RefusedError(f"container {container}: no process of it is left")
    return inside[0]
