"""Handles the requests of the control socket, for one host and its loops.

It knows the requests and who may make them. Pods are made and retired in ``qgpu/daemon/pods.py``, containers in
``container_requests.py`` and Kubernetes claims in ``claim_requests.py`` there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import structlog

import qgpu
from qgpu.config import Config, GpuSettings
from qgpu.daemon import bound_containers, views
from qgpu.daemon.claim_requests import ClaimRequests
from qgpu.daemon.container_requests import ContainerRequests, check_reach
from qgpu.daemon.device_isolation import DeviceIsolation
from qgpu.daemon.gang_exchange import GangExchange
from qgpu.daemon.gpu_loop import GpuLoop
from qgpu.daemon.metrics import Counters
from qgpu.daemon.over_limit import over_limits
from qgpu.daemon.peer_filter import pod_of, refuse_pods
from qgpu.daemon.plane_choice import PlaneChoice, driver_version
from qgpu.daemon.pods import Pods
from qgpu.daemon.prepared_grants import PreparedGrants
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
)
from qgpu.ipc.control_socket import Session
from qgpu.linux import untrusted_fds
from qgpu.model.plane_api import Host, PodInfo
from qgpu.model.plane_names import Plane
from qgpu.nvidia import nvml
from qgpu.policies.registry import POLICIES
from qgpu.runtime.agent import LISTENER

_log = structlog.get_logger("service")

_Request = Callable[[Session, Arguments, list[int]], dict[str, Any]]


class Service:
    """One host, a loop for each of its pGPUs, and the requests about them."""

    def __init__(
        self,
        host: Host,
        chosen: PlaneChoice,
        config: Config,
        state: State,
        listener: Path | None = None,
        prepared: PreparedGrants | None = None,
    ) -> None:
        self._host = host
        self._chosen = chosen
        self._config = config
        self._state = state
        self._started_ns = time.monotonic_ns()
        self._pgpus = {pgpu.index: pgpu for pgpu in host.pgpus()}
        self._fence = DeviceIsolation(chosen.plane, config.device_files, host.pods())
        prepared = prepared or PreparedGrants(None, host.pgpus(), None)
        self.pods = pods = Pods(host, chosen.plane, prepared, self._fence, self._all_settings, self._works)
        self._lock = pods.lock
        self._loads = loads = SimulatedLoads(host, pods.lock)
        self._claims = claims = ClaimRequests(pods)
        #: ``listener`` is the socket that receives containers' listeners, on the plane that needs them.
        self._containers = ContainerRequests(pods, claims, config.containers, listener)
        self.take_listener = self._containers.take_listener
        jobs = SlurmJobs(host, chosen.plane, pods.lock, pods.reap, pods.admit, pods.amend)
        for index in sorted(config.gpus.keys() - self._pgpus.keys()):
            _log.warning("configured, but there is no such pGPU here", pgpu=index)
        board = GangExchange()
        self._loops = {index: GpuLoop(host, index, self._settings(index), board) for index in self._pgpus}
        self._traces = traces = TraceRecordings(self._loops)
        self._unmanaged = UnmanagedProcesses(list(self._pgpus.values()), nvml.processes, host.pods, self._fence)
        if chosen.plane is not Plane.SIM:
            self._unmanaged.start()
        self.counters = Counters(pods, chosen, self._loops, traces, self._fence, self._unmanaged)
        self._looking: dict[str, Callable[[Sequence[PodInfo]], dict[str, Any]]] = {
            "status": self._status,
            "gpu.list": lambda pods: {"gpus": self._gpus(pods)},
            "grant.list": claims.listed,
            "pod.list": self._pod_list,
        }
        self._reading: dict[str, _Request] = {"sim.progress": loads.progress}
        self._changing: dict[str, _Request] = {
            "gpu.set": self._gpu_set,
            "grant.drop": claims.drop,
            "grant.prepare": claims.prepare,
            "pod.create": self._pod_create,
            "pod.attach": self._pod_attach,
            "pod.set": self._pod_set,
            "pod.remove": self._pod_remove,
            "container.bind": self._containers.bind,
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
        return pod_of(session.peer.pid, session.process, self.pods.places, root=session.peer.uid == 0)

    @property
    def alive(self) -> bool:
        """Tell whether every scheduling loop still runs."""
        return all(each.alive for each in self._loops.values())

    def reap(self) -> None:
        """Retire pods without launcher and processes, and give what they had of a claim to its other containers."""
        self._claims.divide(self.pods.reap())

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
            self.pods.check_settings(index, kept)
        except RefusedError as error:
            _log.warning("last setting does not fit the grants, using the configuration", pgpu=index, reason=str(error))
            return configured
        return kept

    def _all_settings(self) -> dict[int, GpuSettings]:
        return {index: loop.settings for index, loop in self._loops.items()}

    def _works(self, name: str) -> bool:
        return self._loads.in_pod(name)

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
        held = self.pods.held_outside(pods)
        return [
            views.gpu(self._pgpus[index], loop, pods) | {"held_outside": held[index]}
            for index, loop in self._loops.items()
        ]

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
            self.pods.check_settings(index, settings)
            loop.settings = settings
            self._state.keep(self._pgpus[index].uuid, self._config.gpu(index), settings)
        _log.info("pGPU set", pgpu=index, **asdict(settings))
        return {}

    def _pod_list(self, pods: Sequence[PodInfo]) -> dict[str, Any]:
        ledgers = {index: loop.ledger for index, loop in self._loops.items()}
        return {"pods": [views.pod(pod, self.pods.labels_of(pod), ledgers) for pod in pods]}

    def _pod_create(self, session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        grants = arguments.grants()
        name = self.pods.launch(arguments.get("name", str), grants, session)
        _log.info("pod created", pod=name)
        return {
            "name": name,
            "plane": self._chosen.plane.value,
            "gpus": [self._pgpus[index].uuid for index in grants],
        }

    def _pod_attach(self, session: Session, arguments: Arguments, fds: list[int]) -> dict[str, Any]:
        name = arguments.need("name", str)
        if any(untrusted_fds.kind(fd) != LISTENER for fd in fds):
            raise InvalidValueError(f"pod {name}: its launcher sent a descriptor that is no seccomp listener")
        with self._lock:
            self.pods.named(name)
            taken = list(fds)
            fds.clear()
            self._host.attach(name, session.peer.pid, taken)
        return {}

    def _pod_set(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        name = arguments.need("name", str)
        with self._lock:
            pod = self.pods.named(name)
            if bound_containers.devices_of(pod):
                raise RefusedError(f"pod {name}: its limits are those of its claim; change the claim")
            index = arguments.get("gpu", int)
            if index is not None and index not in pod.grants:
                raise UnknownNameError(f"pod {name}: it has no grant on pGPU {index}")
            grants = {
                number: arguments.amended(grant) if index in (None, number) else grant
                for number, grant in pod.grants.items()
            }
            if pod.cgroup and any(grant.memory is not None for grant in grants.values()):
                check_reach(pod)
            self.pods.amend(name, grants)
            notes = over_limits(self.pods.named(name))
        _log.info("pod set", pod=name)
        return {"notes": notes}

    def _pod_remove(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        name = arguments.need("name", str)
        with self._lock:
            pod = self.pods.named(name)
            if self.pods.runs(pod):
                raise RefusedError(f"pod {name}: it still runs; end its processes first")
            self.pods.retire(pod)
        _log.info("pod removed", pod=name)
        return {}
