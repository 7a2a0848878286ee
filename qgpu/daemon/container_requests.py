"""Makes containers pods: their hook's request, and the seccomp listeners that their runtime hands over.

A container without prepared devices gets what it asks for, if that fits. One with prepared devices gets those
(``qgpu/daemon/claim_requests.py``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import structlog

from qgpu.daemon import bound_containers
from qgpu.daemon.bound_containers import BoundContainer
from qgpu.daemon.claim_requests import ClaimRequests
from qgpu.daemon.pods import Pods
from qgpu.daemon.request_args import Arguments
from qgpu.errors import QgpuError, RefusedError
from qgpu.ipc.control_socket import Session
from qgpu.linux import cgroup
from qgpu.model import ContainerPolicy
from qgpu.model.plane_api import PodInfo
from qgpu.runtime import seccomp_profile
from qgpu.runtime.oci_container import Container, described

_log = structlog.get_logger("containers")

#: The key of a note at a container's cgroup: which of its devices makes video memory that no limit covers.
_BEYOND = "beyond"


class ContainerRequests:
    """Requests about containers. ``listener`` is the socket for seccomp listeners, on the plane that needs them."""

    def __init__(self, pods: Pods, claims: ClaimRequests, policy: ContainerPolicy, listener: Path | None) -> None:
        self._pods, self._claims, self._policy, self._listener = pods, claims, policy, listener

    def bind(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Make a container a pod before its process starts. The pod ends when the runtime removes its cgroup."""
        container = described(arguments.raw, self._policy)
        if self._listener is not None:
            seccomp_profile.check(container, self._listener)
        devices = container.prepared_devices()
        at = container.cgroup()
        with self._pods.lock:
            name = self._claims.bind(container, devices, at) if devices else self._bind(container, at)
        _log.info("container bound", pod=name, container=container.id, cgroup=at, devices=devices)
        return {"name": name}

    def _bind(self, container: Container, at: str) -> str:
        bound = BoundContainer(container.id, names=container.kubernetes_names())
        container.check_devices()
        wanted = container.wanted()
        cards = container.gpus({index: pgpu.minor for index, pgpu in self._pods.cards.items()})
        cgroup.note(at, _BEYOND, container.beyond_limits())
        name = self._pods.admit(container.pod, dict.fromkeys(cards, wanted.grant), at)
        bound_containers.note(at, bound)
        return name

    def take_listener(self, pid: int, container: str, listener: int) -> None:
        """Attach a container's process, with its seccomp listener, to its pod. Raises a QgpuError.

        Some runtimes report pid 0. The pod is then the one whose cgroup path contains the container's id.
        """
        with self._pods.lock:
            try:
                pod = self._pod_around(pid) if pid else self._pod_of_container(container)
            except QgpuError:
                os.close(listener)
                raise
            self._pods.host.attach(pod.name, pid or pod.pids[0], [listener])

    def _pod_of_container(self, container: str) -> PodInfo:
        for pod in self._pods.listed():
            if container and cgroup.names(pod.cgroup, container) and pod.pids:
                return pod
        raise RefusedError(f"container {container}: no pod has it")

    def _pod_around(self, pid: int) -> PodInfo:
        try:
            at = cgroup.of(pid)
        except OSError as error:
            raise RefusedError(f"process {pid}: {error.strerror}") from error
        inside = [pod for pod in self._pods.listed() if pod.cgroup and cgroup.within(at, pod.cgroup)]
        if not inside:
            raise RefusedError(f"process {pid}: its cgroup {at} belongs to no pod")
        return max(inside, key=lambda pod: len(pod.cgroup))


def check_reach(pod: PodInfo) -> None:
    """Raise RefusedError if a container reaches a device that makes video memory past any limit."""
    if (name := cgroup.noted(pod.cgroup, _BEYOND)) is not None:
        raise RefusedError(
            f"pod {pod.name}: its container reaches {name}, which makes video memory that no limit covers; "
            "start it without that device"
        )
