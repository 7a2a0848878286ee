"""What the daemon does when asked: the requests of the control socket over one host and its loops.

Every change passes admission first and is made under one lock, so what is refused has changed nothing. Pods
that ``qgpuctl run`` made live until their last process has ended and their launcher has hung up.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog

import qgpu
from qgpu import admission, cgroup
from qgpu.config import Config, GpuSettings
from qgpu.control import Session
from qgpu.daemon import shown
from qgpu.daemon.fence import Fence
from qgpu.daemon.gangs import Board
from qgpu.daemon.gpu_loop import GpuLoop
from qgpu.daemon.limits import over_limits
from qgpu.daemon.loads import Loads
from qgpu.daemon.metrics import Counters
from qgpu.daemon.outsiders import Outsiders
from qgpu.daemon.peers import refuse_pods
from qgpu.daemon.planes import Chosen, driver_version
from qgpu.daemon.requests import Arguments
from qgpu.daemon.state import State
from qgpu.daemon.traces import Traces
from qgpu.errors import (
    InvalidValueError,
    PermissionDeniedError,
    QgpuError,
    RefusedError,
    UnknownNameError,
    no_pgpu,
    no_pod,
)
from qgpu.model import Grant
from qgpu.plane import Plane
from qgpu.policies import POLICIES
from qgpu.runtime import seccomp
from qgpu.runtime.container import described
from qgpu.sched import nvml
from qgpu.sched.backend import Host, PodInfo

_log = structlog.get_logger("service")

_Request = Callable[[Session, Arguments, list[int]], dict[str, Any]]


class Service:
    """One host, a loop for each of its pGPUs, and the requests about them."""

    def __init__(self, host: Host, chosen: Chosen, config: Config, state: State, listener: Path | None = None) -> None:
        self._host = host
        #: Where containers' listeners come in, on the plane that needs them.
        self._listener = listener
        self._chosen = chosen
        self._config = config
        self._state = state
        self._lock = threading.RLock()
        self._started_ns = time.monotonic_ns()
        self._pgpus = {pgpu.index: pgpu for pgpu in host.pgpus()}
        #: Pods whose launcher is still connected, with its session.
        self._held: dict[str, Session] = {}
        self._loads = loads = Loads(host, self._lock)
        for index in sorted(config.gpus.keys() - self._pgpus.keys()):
            _log.warning("configured, but there is no such pGPU here", pgpu=index)
        board = Board()
        self._loops = {index: GpuLoop(host, index, self._settings(index), board) for index in self._pgpus}
        self._traces = traces = Traces(self._loops)
        self._fence = Fence(chosen.plane, config.device_files, host.pods())
        self._outsiders = Outsiders(list(self._pgpus.values()), nvml.processes, host.pods, self._fence)
        if chosen.plane is not Plane.SIM:
            self._outsiders.start()
        self.counters = Counters(host, chosen, self._pgpus, self._loops, traces, self._fence, self._outsiders)
        self._reading: dict[str, _Request] = {
            "status": self._status,
            "gpu.list": self._gpu_list,
            "pod.list": self._pod_list,
            "sim.progress": loads.progress,
        }
        self._changing: dict[str, _Request] = {
            "gpu.set": self._gpu_set,
            "pod.create": self._pod_create,
            "pod.attach": self._pod_attach,
            "pod.set": self._pod_set,
            "pod.remove": self._pod_remove,
            "container.bind": self._container_bind,
            "sim.start": loads.start,
            "trace.start": traces.start,
            "trace.read": traces.read,
        }

    def handle(self, session: Session, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Answer one request. Raises a QgpuError for what cannot be done."""
        op = str(message.get("op"))
        if not op.startswith("sim."):  # a simulated card is used through us
            refuse_pods(session.peer.pid, session.process, self._host.pods())
        if op in self._changing and not session.may_change:
            raise PermissionDeniedError(
                f"{op}: only root, the daemon's own user and the socket's group may change things"
            )
        request = self._changing.get(op) or self._reading.get(op)
        if request is None:
            raise InvalidValueError(f"request {op!r}: there is no such request; is qgpuctl of the daemon's version?")
        return request(session, Arguments(message), fds)

    def trusts(self, session: Session) -> bool:
        """Tell whether a client is in no pod, as far as can be told now; each request is asked again."""
        try:
            refuse_pods(session.peer.pid, session.process, self._host.pods())
        except QgpuError:
            return False
        return True

    @property
    def alive(self) -> bool:
        """Tell whether every loop still runs."""
        return all(each.alive for each in self._loops.values())

    def reap(self) -> None:
        """Retire pods that nobody holds and nothing runs in."""
        with self._lock:
            left = []
            for pod in self._host.pods():
                if pod.name not in self._held and not self._runs(pod):
                    self._host.retire(pod.name)
                    _log.info("pod retired", pod=pod.name)
                else:
                    left.append(pod)
            self._fence.tell(left)

    def close(self) -> None:
        """Stop the loops, so that every gate is open, and let go of the host."""
        for each in self._loops.values():
            each.stop()
        self._outsiders.stop()
        try:
            pods = self._host.pods()
        except QgpuError:  # then nobody knows whether there are any
            pods = None
        self._fence.close(pods)
        self._host.close()

    def _settings(self, index: int) -> GpuSettings:
        """Return what a pGPU starts with: as last set where that still fits the grants, else as configured."""
        configured = self._config.gpu(index)
        kept = self._state.settings(self._pgpus[index].uuid, configured)
        try:
            admission.check_settings(index, self._host.pods(), kept)
        except RefusedError as error:
            _log.warning("pGPU as configured, not as last set", pgpu=index, reason=str(error))
            return configured
        return kept

    def _runs(self, pod: PodInfo) -> bool:
        return bool(pod.pids) or self._loads.in_pod(pod.name)

    def _pod(self, name: str) -> PodInfo:
        for pod in self._host.pods():
            if pod.name == name:
                return pod
        raise no_pod(name)

    def _gpu(self, index: int) -> GpuLoop:
        if index not in self._loops:
            raise no_pgpu(index, self._loops)
        return self._loops[index]

    def _status(self, _session: Session, _arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        return {
            "plane": self._chosen.plane.value,
            "why": self._chosen.why,
            "version": qgpu.__version__,
            "driver": driver_version(self._chosen.plane),
            "uptime_s": round((time.monotonic_ns() - self._started_ns) / 1e9, 3),
            "traces": self._traces.count,
            "policies": {name: info.number for name, info in POLICIES.items()},
            "gpus": self._gpus(),
            "device_files": self._fence.shown(),
            "outsiders": [asdict(each) for there in self._outsiders.seen.values() for each in there],
        }

    def _gpu_list(self, _session: Session, _arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        return {"gpus": self._gpus()}

    def _gpus(self) -> list[dict[str, Any]]:
        pods = self._host.pods()
        return [shown.gpu(self._pgpus[index], loop, pods) for index, loop in self._loops.items()]

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

    def _pod_list(self, _session: Session, _arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        ledgers = {index: loop.ledger for index, loop in self._loops.items()}
        return {"pods": [shown.pod(pod, ledgers) for pod in self._host.pods()]}

    def _pod_create(self, session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        grants = arguments.grants()
        with self._lock:
            name = self._admit(arguments.get("name", str), grants)
            self._held[name] = session
            session.at_end.append(partial(self._let_go, name, session))
        _log.info("pod created", pod=name)
        return {
            "name": name,
            "plane": self._chosen.plane.value,
            "gpus": [self._pgpus[index].uuid for index in grants],
        }

    def _container_bind(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Make a container a pod before its process starts. It ends with its cgroup, which its runtime removes."""
        container = described(arguments.raw)
        if self._listener is not None:
            seccomp.check(container, self._listener)
        container.check_devices()
        wanted = container.wanted()
        grants = dict.fromkeys(container.gpus({i: pgpu.minor for i, pgpu in self._pgpus.items()}), wanted.grant)
        at = container.cgroup()
        with self._lock:
            name = self._admit(container.pod, grants, at)
        _log.info("container bound", pod=name, container=container.id, cgroup=at)
        return {"name": name}

    def take_listener(self, pid: int, container: str, listener: int) -> None:
        """Bring a process of a container, with its seccomp listener, into its pod. Raises a QgpuError.

        Where the runtime does not say which process (0), the container's id in the pod's cgroup tells the pod.
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
            if container and container in pod.cgroup and pod.pids:
                return pod
        raise RefusedError(f"container {container}: it is no pod")

    def _pod_around(self, pid: int) -> PodInfo:
        try:
            at = cgroup.of(pid)
        except OSError as error:
            raise RefusedError(f"process {pid}: {error.strerror}") from error
        inside = [pod for pod in self._host.pods() if pod.cgroup and cgroup.within(at, pod.cgroup)]
        if not inside:
            raise RefusedError(f"process {pid}: its cgroup {at} is no pod's")
        return max(inside, key=lambda pod: len(pod.cgroup))

    def _admit(self, wanted: str | None, grants: dict[int, Grant], at: str = "") -> str:
        """Make a pod if it fits, and return its name. It takes the place of one in the same cgroup.

        That is the container's last run: a container that starts has a cgroup to itself.
        """
        self.reap()  # a name whose last bearer has just ended is free
        pods = self._host.pods()
        before = [pod for pod in pods if at and pod.cgroup == at]
        others = [pod for pod in pods if pod not in before]
        name = wanted or _unused_name({pod.name for pod in others})
        settings = {index: each.settings for index, each in self._loops.items()}
        admission.check_new(name, grants, others, list(self._pgpus.values()), settings)
        for pod in before:
            self._host.retire(pod.name)
        self._host.admit(name, grants, at)
        self._fence.tell(self._host.pods())
        return name

    def _let_go(self, name: str, session: Session) -> None:
        with self._lock:
            if self._held.get(name) is session:
                del self._held[name]

    def _pod_attach(self, session: Session, arguments: Arguments, fds: list[int]) -> dict[str, Any]:
        name = arguments.need("name", str)
        with self._lock:
            self._pod(name)
            taken = list(fds)
            fds.clear()
            self._host.attach(name, session.peer.pid, taken)
        return {}

    def _pod_set(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        name = arguments.need("name", str)
        with self._lock:
            pod = self._pod(name)
            index = arguments.get("gpu", int)
            if index is not None and index not in pod.grants:
                raise UnknownNameError(f"pod {name}: it has no grant on pGPU {index}")
            grants = {
                number: arguments.amended(grant) if index in (None, number) else grant
                for number, grant in pod.grants.items()
            }
            settings = {number: each.settings for number, each in self._loops.items()}
            admission.check_amended(name, grants, self._host.pods(), list(self._pgpus.values()), settings)
            self._host.amend(name, grants)
            notes = over_limits(self._pod(name))
        _log.info("pod set", pod=name)
        return {"notes": notes}

    def _pod_remove(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        name = arguments.need("name", str)
        with self._lock:
            pod = self._pod(name)
            if self._runs(pod):
                raise RefusedError(f"pod {name}: it still runs; end its processes first")
            self._host.retire(name)
            self._held.pop(name, None)
        _log.info("pod removed", pod=name)
        return {}


def _unused_name(taken: set[str]) -> str:
    return next(name for n in itertools.count(1) if (name := f"pod-{n}") not in taken)
