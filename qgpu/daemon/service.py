"""Handles the requests of the control socket, for one host and its loops.

Every change passes admission first, under one lock, so a refused request changes nothing. A pod that ``qgpuctl run``
made lives until its last process has ended and its launcher has disconnected.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog

import qgpu
from qgpu import admission
from qgpu.config import Config, GpuSettings
from qgpu.daemon import views
from qgpu.daemon.device_isolation import DeviceIsolation
from qgpu.daemon.gang_exchange import GangExchange
from qgpu.daemon.gpu_loop import GpuLoop
from qgpu.daemon.metrics import Counters
from qgpu.daemon.over_limit import over_limits
from qgpu.daemon.peer_filter import places_of, pod_of, refuse_pods
from qgpu.daemon.plane_choice import PlaneChoice, driver_version
from qgpu.daemon.request_args import Arguments
from qgpu.daemon.simulated_loads import SimulatedLoads
from qgpu.daemon.slurm_jobs import SlurmJobs
from qgpu.daemon.state import State
from qgpu.daemon.trace_recordings import TraceRecordings
from qgpu.daemon.unmanaged_processes import UnmanagedProcesses
from qgpu.errors import (
    InvalidValueError,
    PermissionDeniedError,
    QgpuError,
    RefusedError,
    UnknownNameError,
    no_pgpu,
    no_pod,
)
from qgpu.ipc.control_socket import Session
from qgpu.ipc.wire import has_ended
from qgpu.linux import cgroup, untrusted_fds
from qgpu.model import Grant
from qgpu.model.plane_api import Host, Pgpu, PodInfo
from qgpu.model.plane_names import Plane
from qgpu.nvidia import nvml
from qgpu.policies.registry import POLICIES
from qgpu.runtime import seccomp_profile
from qgpu.runtime.agent import LISTENER
from qgpu.runtime.oci_container import described

_log = structlog.get_logger("service")

#: The key of a note at a container's cgroup: which of its devices makes video memory that no limit covers.
_BEYOND = "beyond"

_Request = Callable[[Session, Arguments, list[int]], dict[str, Any]]


class Service:
    """One host, a loop for each of its pGPUs, and the requests about them."""

    def __init__(
        self, host: Host, chosen: PlaneChoice, config: Config, state: State, listener: Path | None = None
    ) -> None:
        self._host = host
        #: The socket that receives containers' listeners, on the plane that needs them.
        self._listener = listener
        self._chosen = chosen
        self._config = config
        self._state = state
        self._lock = threading.RLock()
        self._started_ns = time.monotonic_ns()
        self._pgpus = {pgpu.index: pgpu for pgpu in host.pgpus()}
        #: Pods by cgroup, as last listed.
        self._places = places_of(host.pods())
        #: Pods whose launcher is still connected, with the launcher's session.
        self._held: dict[str, Session] = {}
        self._loads = loads = SimulatedLoads(host, self._lock)
        jobs = SlurmJobs(host, chosen.plane, self._lock, self.reap, self._admit, self._amend)
        for index in sorted(config.gpus.keys() - self._pgpus.keys()):
            _log.warning("configured, but there is no such pGPU here", pgpu=index)
        board = GangExchange()
        self._loops = {index: GpuLoop(host, index, self._settings(index), board) for index in self._pgpus}
        self._traces = traces = TraceRecordings(self._loops)
        self._fence = DeviceIsolation(chosen.plane, config.device_files, host.pods())
        self._unmanaged = UnmanagedProcesses(list(self._pgpus.values()), nvml.processes, host.pods, self._fence)
        if chosen.plane is not Plane.SIM:
            self._unmanaged.start()
        self.counters = Counters(host, chosen, self._pgpus, self._loops, traces, self._fence, self._unmanaged)
        self._looking: dict[str, Callable[[Sequence[PodInfo]], dict[str, Any]]] = {
            "status": self._status,
            "gpu.list": lambda pods: {"gpus": self._gpus(pods)},
            "pod.list": self._pod_list,
        }
        self._reading: dict[str, _Request] = {"sim.progress": loads.progress}
        self._changing: dict[str, _Request] = {
            "gpu.set": self._gpu_set,
            "pod.create": self._pod_create,
            "pod.attach": self._pod_attach,
            "pod.set": self._pod_set,
            "pod.remove": self._pod_remove,
            "container.bind": self._container_bind,
            "slurm.filter": jobs.filter,
            "slurm.bind": jobs.bind,
            "sim.start": loads.start,
            "trace.start": traces.start,
            "trace.read": traces.read,
        }

    def handle(self, session: Session, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Answer one request. Raises a QgpuError if it cannot be done."""
        op = str(message.get("op"))
        pods: Sequence[PodInfo] = ()
        if not op.startswith("sim."):  # a pod uses its simulated card through the daemon
            pods = self._host.pods()
            refuse_pods(session.peer.pid, session.process, pods, root=session.peer.uid == 0)
        if op in self._changing and not session.may_change:
            raise PermissionDeniedError(
                f"{op}: only root, the daemon's own user and the socket's group may change things"
            )
        if look := self._looking.get(op):
            return look(pods)
        request = self._changing.get(op) or self._reading.get(op)
        if request is None:
            raise InvalidValueError(f"request {op!r}: there is no such request; is qgpuctl of the daemon's version?")
        return request(session, Arguments(message), fds)

    def pod_of(self, session: Session) -> str:
        """Return the pod that a client is in, as last listed. ``handle`` checks again for each request."""
        return pod_of(session.peer.pid, session.process, self._places, root=session.peer.uid == 0)

    @property
    def alive(self) -> bool:
        """Tell whether every scheduling loop still runs."""
        return all(each.alive for each in self._loops.values())

    def reap(self) -> list[PodInfo]:
        """Retire pods without launcher and processes; return the others."""
        with self._lock:
            pods, left = self._host.pods(), []
            self._places = places_of(pods)
            for pod in pods:
                if pod.name not in self._held and not self._runs(pod):
                    self._retire(pod)
                    _log.info("pod retired", pod=pod.name)
                else:
                    left.append(pod)
            self._fence.tell(left)
            return left

    def close(self) -> None:
        """Stop the loops, which opens every gate, and release the host."""
        for each in self._loops.values():
            each.stop()
        self._unmanaged.stop()
        try:
            pods = self._host.pods()
        except QgpuError:  # unknown whether there are any pods
            pods = None
        self._fence.close(pods)
        self._host.close()

    def _settings(self, index: int) -> GpuSettings:
        """Return a pGPU's settings at start: those last set if they fit the grants, else the configured ones."""
        configured = self._config.gpu(index)
        kept = self._state.settings(self._pgpus[index].uuid, configured)
        try:
            admission.check_settings(index, self._host.pods(), kept)
        except RefusedError as error:
            _log.warning("last setting does not fit the grants, using the configuration", pgpu=index, reason=str(error))
            return configured
        return kept

    def _runs(self, pod: PodInfo) -> bool:
        return pod.alive or bool(pod.pids) or self._loads.in_pod(pod.name)

    def _pod(self, name: str) -> PodInfo:
        return _named(name, self._host.pods())

    def _gpu(self, index: int) -> GpuLoop:
        if index not in self._loops:
            raise no_pgpu(index, self._loops)
        return self._loops[index]

    def _status(self, pods: Sequence[PodInfo]) -> dict[str, Any]:
        return {
            "plane": self._chosen.plane.value,
            "why": self._chosen.why,
            "version": qgpu.__version__,
            "driver": driver_version(self._chosen.plane),
            "uptime_s": round((time.monotonic_ns() - self._started_ns) / 1e9, 3),
            "traces": self._traces.count,
            "policies": {name: info.number for name, info in POLICIES.items()},
            "gpus": self._gpus(pods),
            "device_files": self._fence.shown(),
            "unmanaged_processes": [asdict(each) for there in self._unmanaged.seen.values() for each in there],
        }

    def _gpus(self, pods: Sequence[PodInfo]) -> list[dict[str, Any]]:
        return [views.gpu(self._pgpus[index], loop, pods) for index, loop in self._loops.items()]

    def _gpu_set(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        index = arguments.need("gpu", int)
        with self._lock:
            loop = self._gpu(index)
            changes: dict[str, Any] = {
                name: value
                for name, kind in (
                    ("policy", str),
                    ("online_policy", str),
                    ("period_ns", int),
                    ("offline_floor", int),
                )
                if (value := arguments.get(name, kind)) is not None
            }
            settings = replace(loop.settings, **changes)
            admission.check_settings(index, self._host.pods(), settings)
            loop.settings = settings
            self._state.keep(self._pgpus[index].uuid, self._config.gpu(index), settings)
        _log.info("pGPU set", pgpu=index, **asdict(settings))
        return {}

    def _pod_list(self, pods: Sequence[PodInfo]) -> dict[str, Any]:
        ledgers = {index: loop.ledger for index, loop in self._loops.items()}
        return {"pods": [views.pod(pod, ledgers) for pod in pods]}

    def _pod_create(self, session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        grants = arguments.grants()
        with self._lock:
            name = self._admit(arguments.get("name", str), grants, launcher=session)
            self._held[name] = session
            session.at_end.append(partial(self._let_go, name, session))
        _log.info("pod created", pod=name)
        return {
            "name": name,
            "plane": self._chosen.plane.value,
            "gpus": [self._pgpus[index].uuid for index in grants],
        }

    def _container_bind(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Make a container a pod before its process starts. The pod ends when the runtime removes its cgroup."""
        container = described(arguments.raw, self._config.containers)
        if self._listener is not None:
            seccomp_profile.check(container, self._listener)
        container.check_devices()
        wanted = container.wanted()
        grants = dict.fromkeys(container.gpus({i: pgpu.minor for i, pgpu in self._pgpus.items()}), wanted.grant)
        at = container.cgroup()
        with self._lock:
            cgroup.note(at, _BEYOND, container.beyond_limits())
            name = self._admit(container.pod, grants, at)
        _log.info("container bound", pod=name, container=container.id, cgroup=at)
        return {"name": name}

    def take_listener(self, pid: int, container: str, listener: int) -> None:
        """Attach a container's process, with its seccomp listener, to its pod. Raises a QgpuError.

        Some runtimes report pid 0. The pod is then the one whose cgroup path contains the container's id.
        """
        with self._lock:
            try:
                pod = self._pod_around(pid) if pid else self._pod_of_container(container)
            except QgpuError:
                os.close(listener)
                raise
            self._host.attach(pod.name, pid or pod.pids[0], [listener])

    def _pod_of_container(self, container: str) -> PodInfo:
        for pod in self._host.pods():
            if container and cgroup.names(pod.cgroup, container) and pod.pids:
                return pod
        raise RefusedError(f"container {container}: no pod has it")

    def _pod_around(self, pid: int) -> PodInfo:
        try:
            at = cgroup.of(pid)
        except OSError as error:
            raise RefusedError(f"process {pid}: {error.strerror}") from error
        inside = [pod for pod in self._host.pods() if pod.cgroup and cgroup.within(at, pod.cgroup)]
        if not inside:
            raise RefusedError(f"process {pid}: its cgroup {at} belongs to no pod")
        return max(inside, key=lambda pod: len(pod.cgroup))

    def _admit(
        self, wanted: str | None, grants: dict[int, Grant], at: str = "", launcher: Session | None = None
    ) -> str:
        """Make a pod if it fits, and return its name. A pod in the same cgroup is replaced.

        That one is a container's last run: a container that starts has a cgroup of its own.
        """
        pods = self.reap()  # the name of a pod that has just ended is free
        before = [pod for pod in pods if at and pod.cgroup == at]
        others = [pod for pod in pods if pod not in before]
        name = wanted or _unused_name({pod.name for pod in others})
        settings = {index: each.settings for index, each in self._loops.items()}
        admission.check_new(name, grants, others, self._free_pgpus(), settings)
        for pod in before:
            self._retire(pod)
        made = self._home_of(name, launcher) if launcher is not None else ""
        try:
            self._host.admit(name, grants, at or made)
        except BaseException:
            if made:
                cgroup.remove(name, made)
            raise
        now = self._host.pods()
        self._places = places_of(now)
        self._fence.tell(now)
        return name

    def _home_of(self, name: str, launcher: Session) -> str:
        """Make a cgroup for a pod inside its launcher's; none on the simulator. Raises a QgpuError."""
        if self._chosen.plane is Plane.SIM:
            return ""
        try:
            parent = cgroup.home(launcher.peer.pid)
            gone = launcher.process is None or has_ended(launcher.process)
        except OSError:
            gone = True
        if gone:
            raise RefusedError(f"pod {name}: its launcher has ended, or cannot be seen from here; run it on the host")
        return cgroup.create(name, parent)

    def _retire(self, pod: PodInfo) -> None:
        """Remove a pod, and the cgroup if qgpu made it."""
        self._host.retire(pod.name)
        if cgroup.is_made_for(pod.name, pod.cgroup):
            cgroup.remove(pod.name, pod.cgroup)

    def _free_pgpus(self) -> list[Pgpu]:
        """Return the pGPUs without the memory that is still held on behalf of removed pods."""
        left = self._host.left_behind()
        return [replace(pgpu, memory=pgpu.memory - left.get(index, 0)) for index, pgpu in self._pgpus.items()]

    def _let_go(self, name: str, session: Session) -> None:
        with self._lock:
            if self._held.get(name) is session:
                del self._held[name]

    def _pod_attach(self, session: Session, arguments: Arguments, fds: list[int]) -> dict[str, Any]:
        name = arguments.need("name", str)
        if any(untrusted_fds.kind(fd) != LISTENER for fd in fds):
            raise InvalidValueError(f"pod {name}: its launcher sent a descriptor that is no seccomp listener")
        with self._lock:
            self._pod(name)
            taken = list(fds)
            fds.clear()
            self._host.attach(name, session.peer.pid, taken)
        return {}

    def _pod_set(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        name = arguments.need("name", str)
        with self._lock:
            pods = self._host.pods()
            pod = _named(name, pods)
            index = arguments.get("gpu", int)
            if index is not None and index not in pod.grants:
                raise UnknownNameError(f"pod {name}: it has no grant on pGPU {index}")
            grants = {
                number: arguments.amended(grant) if index in (None, number) else grant
                for number, grant in pod.grants.items()
            }
            if pod.cgroup and any(grant.memory is not None for grant in grants.values()):
                _check_reach(pod)
            self._amend(name, grants, pods)
            notes = over_limits(self._pod(name))
        _log.info("pod set", pod=name)
        return {"notes": notes}

    def _amend(self, name: str, grants: dict[int, Grant], pods: Sequence[PodInfo]) -> None:
        """Change a pod's grants if they fit beside those of the other pods."""
        settings = {number: each.settings for number, each in self._loops.items()}
        admission.check_amended(name, grants, pods, self._free_pgpus(), settings)
        self._host.amend(name, grants)

    def _pod_remove(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        name = arguments.need("name", str)
        with self._lock:
            pod = self._pod(name)
            if self._runs(pod):
                raise RefusedError(f"pod {name}: it still runs; end its processes first")
            self._retire(pod)
            self._held.pop(name, None)
        _log.info("pod removed", pod=name)
        return {}


def _named(name: str, pods: Sequence[PodInfo]) -> PodInfo:
    for pod in pods:
        if pod.name == name:
            return pod
    raise no_pod(name)


def _check_reach(pod: PodInfo) -> None:
    """Raise RefusedError if a container reaches a device that makes video memory past any limit."""
    if (name := cgroup.noted(pod.cgroup, _BEYOND)) is not None:
        raise RefusedError(
            f"pod {pod.name}: its container reaches {name}, which makes video memory that no limit covers; "
            "start it without that device"
        )


def _unused_name(taken: set[str]) -> str:
    return next(name for n in itertools.count(1) if (name := f"pod-{n}") not in taken)
