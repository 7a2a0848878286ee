"""The pods of this host as the daemon manages them: what is left to grant, and how pods are made and retired.

Every change is made under one lock, after admission, so a refused request changes nothing. A pod that ``qgpuctl run``
made lives until its last process has ended and its launcher has disconnected.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import structlog

from qgpu import admission
from qgpu.admission import Occupancy, Yielding
from qgpu.config import GpuSettings
from qgpu.daemon import caller, container_notes
from qgpu.daemon.device_isolation import DeviceIsolation
from qgpu.daemon.orphaned_memory import OrphanedMemory
from qgpu.daemon.peer_filter import pods_by_cgroup
from qgpu.daemon.pod_users import PodUsers
from qgpu.daemon.prepared_grants import PreparedGrants
from qgpu.daemon.socket_group_turn import SocketGroupTurn
from qgpu.errors import QgpuError, RefusedError, no_pod
from qgpu.ipc.control_socket import Session
from qgpu.ipc.wire import has_ended
from qgpu.linux import cgroup
from qgpu.model import Grant
from qgpu.model.container_labels import ContainerLabels
from qgpu.model.plane_api import Host, Pgpu, PodInfo
from qgpu.model.plane_names import Plane
from qgpu.model.prepared_grant import GROUP_PREFIX, PreparedGrant
from qgpu.slurm import job

_log = structlog.get_logger("pods")

#: The key of a note at a pod's cgroup: it waits for room in its card's memory. A daemon that starts finds it there.
_WAITS = "waits"
#: The names of claims' groups (``PreparedGrant.group``); those of containers have dots.
_OF_CLAIMS = re.compile(rf"{GROUP_PREFIX}[A-Za-z0-9-]+")
#: How long a pod waits for its owner's pods that have just ended, and how often it looks.
_LEFT_S, _LEFT_POLL_S = 1.0, 0.05


class Pods:
    """The pods of one host, beside its prepared grants."""

    def __init__(
        self,
        host: Host,
        plane: Plane,
        prepared: PreparedGrants,
        isolation: DeviceIsolation,
        settings: Callable[[], Mapping[int, GpuSettings]],
        works: Callable[[str], bool],
    ) -> None:
        self.lock = threading.RLock()
        self.host, self.prepared = host, prepared
        self.cards: Mapping[int, Pgpu] = {pgpu.index: pgpu for pgpu in host.pgpus()}
        self._plane, self._isolation, self._settings = plane, isolation, settings
        #: Tells whether a pod works although no process of it is listed.
        self._works = works
        #: Which pods cannot make room for others, and what host memory holds of those that do.
        self.yielding: Callable[[], Yielding] = admission.Yielding
        #: Called with the name of a pod that is gone; a later pod of that name is another one.
        self.retired: Callable[[str], None] = lambda _name: None
        #: Pods that begin without asking whether there is room.
        self.begun: set[str] = set()
        #: Pods made by requests that are not recorded yet.
        self._new: set[str] = set()
        #: Pods by cgroup. A cgroup is in it before its pod's first process, and until its pod is known to be gone.
        self.by_cgroup = pods_by_cgroup(host.pods())
        #: Pods whose launcher is still connected, with the launcher's session.
        self._launchers: dict[str, Session] = {}
        self.turn = SocketGroupTurn()
        self.users = PodUsers(host.pods())
        self.orphaned = OrphanedMemory(host, prepared)
        for pod in host.pods():
            self.orphaned.used(container_notes.devices_of(pod), self.users.owner_of(pod.name))

    def listed(self) -> Sequence[PodInfo]:
        """Return the pods."""
        return self.host.pods()

    def named(self, name: str) -> PodInfo:
        """Return a pod. Raises UnknownNameError."""
        for pod in self.host.pods():
            if pod.name == name:
                return pod
        raise no_pod(name)

    def runs(self, pod: PodInfo) -> bool:
        """Tell whether a pod may have a process."""
        return pod.alive or bool(pod.pids) or self._works(pod.name)

    def reap(self) -> list[PodInfo]:
        """Retire pods without launcher and processes; return the others."""
        with self.lock:
            pods, left = self.host.pods(), []
            self.by_cgroup = pods_by_cgroup(pods)
            for pod in pods:
                if self._is_over(pod):
                    self.retire(pod)
                    _log.info("pod retired", pod=pod.name)
                else:
                    left.append(self._without_ended(pod))
            self._isolation.set_pods(left)
            self.orphaned.forget_gone()
            return left

    def launch(self, wanted: str | None, grants: dict[int, Grant], launcher: Session, *, may_wait: bool) -> str:
        """Make a pod that lasts as long as its launcher is connected, and return its name. Raises a QgpuError."""
        with self.lock:
            self._check_launcher(launcher)
            name = self.admit(wanted, grants, launcher=launcher, may_wait=may_wait)
            self._launchers[name] = launcher
            launcher.at_end.append(partial(self._let_go, name, launcher))
        return name

    def admit(
        self,
        wanted: str | None,
        grants: dict[int, Grant],
        at: str = "",
        launcher: Session | None = None,
        *,
        may_wait: bool = True,
        of_job: bool = False,
    ) -> str:
        """Make a pod if it fits, and return its name. Raises a QgpuError.

        ``at`` is its cgroup; if empty, one is made in the launcher's. A pod in the same cgroup is replaced: it is a
        container's last run, because a container that starts has a cgroup of its own. Without ``may_wait`` its memory
        must fit beside that of all others at once, because its launcher does not ask whether there is room. Only a pod
        ``of_job`` is called as those of Slurm's jobs are.
        """
        with self.lock:
            pods = self.reap()  # the name of a pod that has just ended is free
            before = [pod for pod in pods if at and pod.cgroup == at]
            others = [pod for pod in pods if pod not in before]
            name = wanted or _unused_name({pod.name for pod in others} | set(self.host.names_in_use()))
            if name in self.prepared.by_group:
                raise RefusedError(f"pod name {name}: a claim's group has it; choose another")
            if _OF_CLAIMS.fullmatch(name):
                raise RefusedError(f"pod name {name}: claims' groups have such names; choose another")
            if job.is_pod_name(name) and not of_job:
                raise RefusedError(f"pod name {name}: jobs of Slurm have such names; choose another")
            settings = self._settings() if may_wait else _granted_once(self._settings())
            admission.check_new(name, grants, replace(self._occupancy(others), settings=settings))
            for pod in before:
                self.retire(pod)
            made = self._home_of(name, launcher) if launcher is not None else ""
            try:
                if not may_wait:
                    self.begun.add(name)
                self.make(name, grants, at or made)
                if launcher is not None:
                    self.users.note(name, made, launcher.peer.uid)
            except BaseException:
                self.begun.discard(name)
                if made:
                    cgroup.remove(name, made)
                raise
        return name

    def launch_group(self, name: str, grants: dict[int, Grant], launcher: Session) -> None:
        """Make the pod of a claim's group, or take over one whose launcher has ended. Raises a QgpuError.

        What it may have is the claim's, which has passed admission. It cannot yield its memory.
        """
        with self.lock:
            there = [pod for pod in self.reap() if pod.name == name]
            if name in self._launchers:
                raise RefusedError(f"pod {name}: another keeper holds it; end that first")
            if there and there[0].grants != grants:
                raise RefusedError(f"pod {name}: its limits are not its claim's; end its processes first")
            if not there:
                self.check_quotas(name, grants)
                made = self._home_of(name, launcher) or _simulated_home(name)
                try:
                    self.make(name, grants, made)
                except BaseException:
                    if made:
                        cgroup.remove(name, made)
                    raise
            self.begun.add(name)
            self._launchers[name] = launcher
            launcher.at_end.append(partial(self._let_go, name, launcher))

    def await_left(self, whose: str) -> None:
        """Wait a moment until nothing is left of an owner's pods that have just ended. The caller holds no lock.

        Raises RefusedError if too much is.
        """
        if not whose:
            return
        self.reap()
        until = time.monotonic() + _LEFT_S
        while True:
            late = time.monotonic() > until
            with self.lock, suppress(*() if late else (RefusedError,)):
                self.users.check_left(whose, self.host.names_in_use)
                if late or not self.orphaned.any_of(whose):
                    return
            time.sleep(_LEFT_POLL_S)

    def check_free(self, at: str) -> None:
        """Raise RefusedError unless a container may be a pod in its cgroup, where no other process is.

        The last run of a container may be a pod there, too. It is replaced.
        """
        if any(cgroup.within(at, own) for own in (cgroup.GUARDIANS, cgroup.LOCK)):
            raise RefusedError(f"cgroup {at}: it is qgpu's own; start the container in another")
        for pod in self.host.pods():
            if pod.cgroup == at and pod.name in self._launchers:
                raise RefusedError(f"cgroup {at}: it is that of pod {pod.name}; start the container in another")
            for each in pod.cgroups:
                if at != each and (cgroup.within(at, each) or cgroup.within(each, at)) and cgroup.exists(each):
                    raise RefusedError(
                        f"cgroup {at}: it overlaps {each} of pod {pod.name}; start the container in another"
                    )

    def join(self, name: str, at: str) -> None:
        """Add a container's cgroup to a pod, and remove it from all others. Raises a QgpuError."""
        with self.lock:
            self.leave(at)
            self.host.join(name, [*self.named(name).joined, at])
            self.isolate()

    def isolate(self) -> None:
        """Keep device files to the cgroups of pods as they are noted now, and requests from pods out."""
        now = self.host.pods()
        self.by_cgroup = pods_by_cgroup(now)
        self._isolation.set_pods(now)

    def leave(self, at: str) -> None:
        """Remove a cgroup from the pods that it had joined, because its container starts anew. Raises a QgpuError."""
        for pod in self.host.pods():
            if at in pod.joined:
                self.host.join(pod.name, [each for each in pod.joined if each != at])

    def check_amended(self, name: str, grants: Mapping[int, Grant]) -> None:
        """Check new grants of a pod. Raises a QgpuError."""
        admission.check_amended(name, grants, self._occupancy(self.host.pods()))

    def amend(self, name: str, grants: Mapping[int, Grant]) -> None:
        """Change a pod's grants if they fit. Raises a QgpuError."""
        self.check_amended(name, grants)
        self.host.amend(name, grants)

    def check_quotas(self, name: str, grants: Mapping[int, Grant]) -> None:
        """Check that a pod gets anything under the policies in force. Raises RefusedError."""
        admission.check_quotas(name, grants, self._settings())

    def make(self, name: str, grants: dict[int, Grant], at: str) -> None:
        """Make a pod that has passed admission. Raises a QgpuError."""
        self._note_waits(at, name not in self.begun and self.is_overcommitted(grants))
        self.host.admit(name, grants, at)
        self._new.add(name)
        self.users.forget(name)
        self.orphaned.began(name)
        self.isolate()

    def is_new(self, name: object) -> bool:
        """Tell whether a pod was just made; true once for each. A container or task may also join an existing pod."""
        with self.lock:
            new = name in self._new
            self._new.discard(str(name))
        return new

    def retire(self, pod: PodInfo) -> None:
        """Remove a pod, and the cgroup if qgpu made it. Raises a QgpuError."""
        with self.orphaned.ending(pod.name, self.users.owner_of(pod.name)):
            self.host.retire(pod.name)
        self._launchers.pop(pod.name, None)
        self.users.forget(pod.name)
        self.begun.discard(pod.name)
        self._new.discard(pod.name)
        self.retired(pod.name)
        if cgroup.is_made_for(pod.name, pod.cgroup):
            cgroup.remove(pod.name, pod.cgroup)

    def may_begin(self, pod: PodInfo) -> None:
        """Note that a pod no longer waits for room."""
        self._note_waits(pod.cgroup, waits=False)

    def has_begun(self, pod: PodInfo) -> bool:
        """Tell whether a pod that an earlier daemon made no longer waits for room."""
        return not pod.cgroup or not cgroup.get_xattr(pod.cgroup, _WAITS)

    def is_overcommitted(self, indexes: Iterable[int]) -> bool:
        """Tell whether the memory of any of these pGPUs is overcommitted."""
        settings = self._settings()
        return any(index in settings and settings[index].memory_overcommit > 1 for index in indexes)

    def check_settings(self, index: int, wanted: GpuSettings, now: GpuSettings) -> None:
        """Check new settings of a pGPU, in place of those ``now``, against what is granted. Raises RefusedError."""
        pods, held = self.outside(self.host.pods()), self.prepared.held()
        admission.check_settings(index, pods, wanted, held)
        if wanted.memory_overcommit != now.memory_overcommit:
            admission.check_overcommit(self.cards[index], pods, wanted, now, held)

    def check_prepared(self, grant: PreparedGrant, pods: Sequence[PodInfo]) -> None:
        """Check what a claim is to hold, in place of what it holds now. Raises RefusedError."""
        known = self.prepared.by_name.keys() | {device.name for device in grant.devices}
        groups = self.prepared.by_group.keys() | {grant.group}
        # Containers whose claim was lost count to it again.
        others = container_notes.outside(pods, known, groups)
        beside = replace(self._occupancy(()), pods=others, prepared=self.prepared.held(besides=grant.uid))
        admission.check_prepared(self.prepared.wanted(grant), beside)

    def outside(self, pods: Sequence[PodInfo]) -> list[PodInfo]:
        """Return the pods as admission counts them beside the prepared grants."""
        return container_notes.outside(pods, self.prepared.by_name.keys(), self.prepared.by_group.keys())

    def held_outside(self, pods: Sequence[PodInfo]) -> dict[int, dict[str, int]]:
        """Return what pods without prepared grants hold of each pGPU: quotas in per cent, memory in bytes.

        A pod without a memory limit holds what it has now. What is held on behalf of pods that are gone counts, too.
        """
        left = self.orphaned.outside()
        others = self.outside([pod for pod in pods if not self._is_over(pod)])
        result = {}
        for index in self.cards:
            there = [(pod.grants[index], pod.memory.get(index, 0)) for pod in others if index in pod.grants]
            result[index] = {
                "cores": sum(grant.cores or 0 for grant, _ in there),
                "memory": left.get(index, 0) + sum(max(grant.memory or 0, has) for grant, has in there),
            }
        return result

    def overdrawn(self, index: int) -> int:
        """Return how many bytes of a pGPU are granted, or held for ended pods, beyond what may be granted."""
        granted = [held.grant for held in self.prepared.held() if held.index == index]
        granted += [pod.grants[index] for pod in self.outside(self.host.pods()) if index in pod.grants]
        left = self.orphaned.outside().get(index, 0)
        most = int(self.cards[index].memory * self._settings()[index].memory_overcommit)
        return max(0, left + sum(grant.memory or 0 for grant in granted) - most)

    def labels_of(self, pod: PodInfo) -> ContainerLabels:
        """Return what Kubernetes calls a pod's container."""
        if (grant := self.prepared.by_group.get(pod.name)) is not None:
            return ContainerLabels(grant.namespace, claim=grant.name)
        return container_notes.labels_of(pod, self.prepared.by_name)

    def _without_ended(self, pod: PodInfo) -> PodInfo:
        """Remove the cgroups of ended containers from a pod, and return the pod. Raises a QgpuError."""
        left = tuple(at for at in pod.joined if cgroup.exists(at))
        if left != pod.joined:
            self.host.join(pod.name, left)
        return replace(pod, joined=left)

    def capacity(self, index: int) -> int:
        """Return a pGPU's memory less what is still held on behalf of removed pods, in bytes."""
        return self.cards[index].memory - self.host.orphaned_memory().get(index, 0)

    def _occupancy(self, pods: Sequence[PodInfo]) -> Occupancy:
        """Return what grants must fit beside these pods; who can yield matters only where memory is overcommitted."""
        settings = self._settings()
        yielding = self.yielding() if self.is_overcommitted(self.cards) else admission.Yielding()
        return Occupancy(self.outside(pods), self._free_pgpus(), settings, self.prepared.held(), yielding)

    @staticmethod
    def _note_waits(at: str, waits: bool) -> None:
        with suppress(RefusedError):  # at worst the next daemon takes it for one that has begun
            if at:
                cgroup.set_xattr(at, _WAITS, "1" if waits else "")

    def _check_launcher(self, launcher: Session) -> None:
        """Raise RefusedError if a launcher may make no more pods."""
        if not caller.is_own(launcher) and launcher in self._launchers.values():
            raise RefusedError(f"process {launcher.peer.pid}: its connection has made a pod already; connect for each")
        self.users.check_number(launcher, self.host.pods(), self.host.names_in_use)

    def _is_over(self, pod: PodInfo) -> bool:
        """Tell whether a pod is to be retired."""
        return pod.name not in self._launchers and not self.runs(pod)

    def _home_of(self, name: str, launcher: Session) -> str:
        """Make a cgroup for a pod inside its launcher's; none on the simulator. Raises a QgpuError."""
        if self._plane is Plane.SIM:
            return ""
        try:
            parent = cgroup.pod_parent(launcher.peer.pid)
            gone = launcher.process is None or has_ended(launcher.process)
        except OSError:
            gone = True
        if gone:
            raise RefusedError(f"pod {name}: its launcher has ended, or cannot be seen from here; run it on the host")
        return cgroup.create(name, parent)

    def _free_pgpus(self) -> list[Pgpu]:
        """Return the pGPUs without the memory that is held on behalf of removed pods and belongs to no claim."""
        left = self.orphaned.outside()
        return [replace(pgpu, memory=pgpu.memory - left.get(index, 0)) for index, pgpu in self.cards.items()]

    def _let_go(self, name: str, session: Session) -> None:
        with self.lock:
            if self._launchers.get(name) is session:
                del self._launchers[name]


def _granted_once(settings: Mapping[int, GpuSettings]) -> dict[int, GpuSettings]:
    return {index: replace(each, memory_overcommit=1.0) for index, each in settings.items()}


def _simulated_home(name: str) -> str:
    """Make a cgroup for a group on the simulator, so that it outlives the daemon; none where that cannot be had."""
    try:
        return cgroup.create(name)
    except QgpuError:
        return ""


def _unused_name(taken: set[str]) -> str:
    return next(name for n in itertools.count(1) if (name := f"pod-{n}") not in taken)
