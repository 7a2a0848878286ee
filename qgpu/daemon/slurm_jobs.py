"""Makes pods of Slurm's jobs, when the SPANK plugin asks for it in a task that is about to start.

What a job's steps were given is in ``qgpu.slurm.job``. A limit that an administrator set on a job's pod stays, whatever
later steps were given.
"""

from __future__ import annotations

import platform
from contextlib import suppress
from typing import Any

import structlog

from qgpu.daemon.pods import Pods
from qgpu.daemon.request_args import Arguments
from qgpu.errors import InvalidValueError, RefusedError
from qgpu.guardian.proxy import seccomp_filter
from qgpu.ipc.control_socket import Session
from qgpu.ipc.wire import has_ended
from qgpu.linux import cgroup, untrusted_fds
from qgpu.model import Grant
from qgpu.model.plane_api import PodInfo
from qgpu.model.plane_names import Plane
from qgpu.runtime.agent import LISTENER
from qgpu.slurm import job
from qgpu.slurm.job import Step

_log = structlog.get_logger("slurm")


class SlurmJobs:
    """The requests of the SPANK plugin."""

    def __init__(self, pods: Pods, plane: Plane) -> None:
        self._pods, self._plane = pods, plane
        #: The grants that each job's pod got from here; others were set by an administrator.
        self._given: dict[str, dict[int, Grant]] = {}

    def filter(self, _session: Session, _arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Return the filter that a task installs, in hexadecimal digits; empty where the plane needs none."""
        needed = self._plane is Plane.SECCOMP
        return {"filter": seccomp_filter.program(platform.machine()).hex() if needed else ""}

    def bind(self, session: Session, arguments: Arguments, fds: list[int]) -> dict[str, Any]:
        """Bring the task that asks into its job's pod, with its seccomp listener on that plane. Raises a QgpuError."""
        step = job.described(arguments.raw)
        if any(untrusted_fds.kind(fd) != LISTENER for fd in fds):
            raise InvalidValueError(f"pod {step.pod}: its task sent a descriptor that is no seccomp listener")
        grants = step.grants({pgpu.index: pgpu for pgpu in self._pods.host.pgpus()})
        with self._pods.lock:
            pods = self._pods.reap()
            self._given = {pod.name: self._given[pod.name] for pod in pods if pod.name in self._given}
            pod = next((pod for pod in pods if pod.name == step.pod), None)
            at = self._cgroup(session, step)
            if pod is None:
                self._pods.admit(step.pod, grants, at, None if at else session, may_wait=False, of_job=True)
                self._given[step.pod] = grants
            elif pod.cgroup not in ("", at) and (at or not cgroup.is_made_for(pod.name, pod.cgroup)):
                raise RefusedError(f"pod {pod.name}: it is not that of job {step.job}; end its processes first")
            else:
                self._widen(pod, grants)
            listeners = list(fds)
            fds.clear()
            self._pods.host.attach(step.pod, session.peer.pid, listeners)
        _log.info("task of a job attached", pod=step.pod, pid=session.peer.pid)
        plane = self._plane.value
        variables = "\n".join(f"{name}={value}" for name, value in job.variables(plane, step).items())
        return {"name": step.pod, "plane": plane, "variables": variables}

    def _widen(self, pod: PodInfo, wanted: dict[int, Grant]) -> None:
        """Give a pod what another step of its job was given, except on pGPUs whose grant was changed meanwhile."""
        given, grants = dict(self._given.get(pod.name, {})), dict(pod.grants)
        for index, grant in wanted.items():
            if index not in grants:
                grants[index] = given[index] = grant
            elif grants[index] == given.get(index):
                grants[index] = given[index] = job.larger(grants[index], grant)
        if grants != pod.grants:
            self._pods.amend(pod.name, grants)
        self._given[pod.name] = given

    def _cgroup(self, session: Session, step: Step) -> str:
        """Return the cgroup that Slurm made for the job; empty where there is none in the version 2 tree."""
        with suppress(OSError):
            at = job.cgroup_of(step.job, cgroup.of(session.peer.pid))
            if session.process is not None and not has_ended(session.process):  # so the pid was not reused before
                return at
        raise RefusedError(f"pod {step.pod}: its task has ended; start the step again")
