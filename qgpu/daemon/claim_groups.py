"""The share groups of Kubernetes claims: whose pod a group is, whether it takes members, and how it ends.

A claim that asks for MPS is one pod, in which all its containers are members. What the pod may have is what the claim
holds. The supervisor of groups (``qgpu/groups/supervisor.py``) runs its keeper: qgpud starts and ends no process, and
waits for the supervisor without the pods' lock, because keepers make requests themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from qgpu.daemon import caller
from qgpu.daemon.pods import Pods
from qgpu.errors import BackendGoneError, PermissionDeniedError, RefusedError, UnknownNameError
from qgpu.groups import mps_server
from qgpu.groups.group_files import GroupFiles
from qgpu.groups.mps_server import WITH_MPS, check_installed
from qgpu.ipc.control_socket import Session
from qgpu.linux import cgroup
from qgpu.model.plane_api import PodInfo
from qgpu.model.plane_names import Plane
from qgpu.model.prepared_grant import PreparedGrant

#: How long a request waits for a group to begin or to end; whoever asked then asks again. A driver waits 20 s.
_WAIT_S, _POLL_S = 8.0, 0.05


class ClaimGroups:
    """The groups of prepared grants. ``files`` returns a group's files by its name."""

    def __init__(self, pods: Pods, plane: Plane, files: Callable[[str], GroupFiles]) -> None:
        self._pods, self._plane, self._files = pods, plane, files
        #: The groups whose claims are being given up: they take no members, and the supervisor ends them.
        self._ending: set[str] = set()

    def shown(self, grant: PreparedGrant) -> dict[str, Any]:
        """Return what the supervisor must know of a claim, in JSON types."""
        return {"group": grant.group, "ending": grant.group in self._ending} if grant.group else {}

    def check(self, grant: PreparedGrant) -> None:
        """Raise NotSupportedError if this host lacks MPS for a claim's group; InvalidValueError for a name too long."""
        if not grant.group:
            return
        cgroup.check_name(grant.group)
        if self._plane in WITH_MPS:
            check_installed()

    def begin(self, grant: PreparedGrant) -> None:
        """Let a claim have a group from now on. RefusedError if another pod has its name. The caller holds the lock."""
        if not grant.group:
            return
        pod = self._pod(grant.group)
        if pod is not None and pod.grants != self._limits(grant):
            raise RefusedError(f"{grant}: there is a pod {grant.group} with other limits; end its processes first")
        self._ending.discard(grant.group)

    def launch(self, name: str, keeper: Session) -> Sequence[int]:
        """Give a group's keeper the pod, with what the claim holds, and return its cards. Raises a QgpuError."""
        if not caller.is_own(keeper):
            raise PermissionDeniedError(f"pod name {name}: a claim's group has it, which root keeps; choose another")
        with self._pods.lock:
            grant = self._pods.prepared.by_group.get(name)
            if grant is None or name in self._ending:
                raise RefusedError(f"group {name}: its claim is being given up; make another")
            limits, whose = self._limits(grant), f"namespace {grant.namespace}"
            self._pods.users.check_left(whose, self._pods.host.names_in_use)
            self._pods.launch_group(name, limits, keeper)
            self._pods.users.note_owner(name, self._pods.named(name).cgroup, whose)
        return list(limits)

    def await_ready(self, grant: PreparedGrant) -> None:
        """Wait until a claim's group takes members. RefusedError with what is in the way."""
        until = time.monotonic() + _WAIT_S
        while grant.group and (why := self._missing(grant.group)):
            if (problem := self._files(grant.group).problem) or time.monotonic() > until:
                raise RefusedError(f"{grant}: sharing MPS: {problem or why}; it is tried again")
            time.sleep(_POLL_S)

    def check_ready(self, grant: PreparedGrant) -> None:
        """Raise BackendGoneError, upon which a container's hook asks again, if a group takes no members now."""
        if why := self._missing(grant.group):
            raise BackendGoneError(f"{grant}: sharing MPS: {self._files(grant.group).problem or why}; try again")

    def check_open(self, name: str) -> None:
        """Raise BackendGoneError if a claim is being given up. The caller holds the lock, so that this stays so."""
        if name in self._ending:
            raise BackendGoneError(f"group {name}: its claim is being given up; try again")

    def end(self, grant: PreparedGrant) -> None:
        """Have a claim's group ended. Raises RefusedError while it has members, or as long as it has not ended."""
        name = grant.group
        with self._pods.lock:
            pod = self._pod(name)
            if pod is not None and has_members(pod):
                raise RefusedError(f"{grant}: containers of its group {name} still run; it stays prepared")
            self._ending.add(name)
        until = time.monotonic() + _WAIT_S
        while self._pod(name) is not None or self._files(name).keeper() is not None:
            if time.monotonic() > until:
                raise RefusedError(
                    f"{grant}: its group {name} has not ended, and it stays prepared; does qgpu-groups.service run?"
                )
            time.sleep(_POLL_S)

    def forget(self, grant: PreparedGrant) -> None:
        """Forget the group of a claim that is given up."""
        self._ending.discard(grant.group)

    def _limits(self, grant: PreparedGrant) -> dict[int, Any]:
        """Return a claim's part of its card, by the card's number. Raises RefusedError if the card is gone."""
        (device,) = grant.devices
        index = self._pods.prepared.index(device)
        if index is None:
            raise RefusedError(f"{grant}: card {device.gpu} is gone; make another claim")
        return {index: device.grant}

    def _missing(self, name: str) -> str:
        """Return what keeps a group from taking members; empty if nothing does."""
        files = self._files(name)
        if name in self._ending:
            return "its group is being ended"
        if not files.begun or self._pod(name) is None:
            return "its group has not begun; is qgpu-groups.service enabled on this node?"
        if self._plane in WITH_MPS and not files.server.answers:
            return f"its MPS control daemon takes no clients; see {files.directory}/log"
        return ""

    def _pod(self, name: str) -> PodInfo | None:
        with suppress(UnknownNameError):
            return self._pods.named(name)
        return None


def has_members(pod: PodInfo) -> bool:
    """Tell whether a group has a process that is not MPS's own; in a container every process counts."""
    return mps_server.has_members(pod.pids) or cgroup.members(*pod.joined).alive
