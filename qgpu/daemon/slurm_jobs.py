"""Makes pods of Slurm's jobs, when the SPANK plugin asks for it in a task that is about to start.

What a job's steps were given is in ``qgpu.slurm.job``. A limit that an administrator set on a job's pod stays, whatever
later steps were given.
"""

from __future__ import annotations

import json
import platform
from contextlib import suppress
from dataclasses import replace
from typing import Any

import structlog

from qgpu import units
from qgpu.daemon import pod_users, slurm_steps
from qgpu.daemon.pods import Pods
from qgpu.daemon.request_args import Arguments
from qgpu.errors import InvalidValueError, RefusedError
from qgpu.guardian.proxy import seccomp_filter
from qgpu.ipc.codec import grants_from_json, grants_to_json
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

#: The key of the note at a pod's cgroup of the grants that it got from here.
_GIVEN = "given"


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
        whose = "" if step.uid is None else pod_users.user(step.uid)
        if whose and all(pod.name != step.pod for pod in self._pods.listed()):
            self._pods.await_left(whose)
        with self._pods.lock:
            pods = self._pods.reap()
            self._given = {pod.name: self._given[pod.name] for pod in pods if pod.name in self._given}
            pod = next((pod for pod in pods if pod.name == step.pod), None)
            at, of_step = self._cgroups(session, step)
            grants = self._without_left(grants, whose, begun=pod is not None)
            if at and self._plane is Plane.SECCOMP:
                others = [each for other in pods if other.name != step.pod for each in other.cgroups]
                self._note(at, of_step, others, new=pod is None)
            if pod is None:
                self._pods.admit(step.pod, grants, at, None if at else session, may_wait=False, of_job=True)
                self._gave(step.pod, at or self._pods.named(step.pod).cgroup, grants)
            elif pod.cgroup not in ("", at) and (at or not cgroup.is_made_for(pod.name, pod.cgroup)):
                raise RefusedError(f"pod {pod.name}: it is not that of job {step.job}; end its processes first")
            else:
                self._widen(pod, grants)
            self._pods.users.note_owner(step.pod, self._pods.named(step.pod).cgroup, whose)
            listeners = list(fds)
            fds.clear()
            self._pods.host.attach(step.pod, session.peer.pid, listeners)
        _log.info("task of a job attached", pod=step.pod, pid=session.peer.pid)
        plane = self._plane.value
        variables = "\n".join(f"{name}={value}" for name, value in job.variables(plane, step).items())
        return {"name": step.pod, "plane": plane, "variables": variables}

    def _widen(self, pod: PodInfo, wanted: dict[int, Grant]) -> None:
        """Give a pod what another step of its job was given, except on pGPUs whose grant was changed meanwhile."""
        given, grants = dict(self._given.get(pod.name) or _given_at(pod.cgroup)), dict(pod.grants)
        for index, grant in wanted.items():
            if index not in grants:
                grants[index] = given[index] = grant
            elif grants[index] == given.get(index):
                grants[index] = given[index] = job.larger(grants[index], grant)
        if grants != pod.grants:
            self._pods.amend(pod.name, grants)
        self._gave(pod.name, pod.cgroup, given)

    def _gave(self, name: str, at: str, grants: dict[int, Grant]) -> None:
        """Note what a pod got from here, for the next daemon too."""
        self._given[name] = grants
        with suppress(RefusedError):  # at worst the next daemon takes it for an administrator's
            if at:
                cgroup.set_xattr(at, _GIVEN, json.dumps(grants_to_json(grants)))

    def _without_left(self, grants: dict[int, Grant], whose: str, *, begun: bool) -> dict[int, Grant]:
        """Return a step's grants without the memory that ended pods of its user have left.

        Raises RefusedError if nothing is left for a job that has not begun.
        """
        found = dict(grants)
        for index, grant in grants.items():
            if whose and grant.memory is not None and (left := self._pods.orphaned.of(whose, index)):
                if grant.memory - left < units.LEAST_LIMIT and not begun:
                    raise RefusedError(
                        f"pGPU {index}: other processes have {units.format_memory(left)} of ended pods of {whose}, and "
                        f"the job has {units.format_memory(grant.memory)}; end those processes first"
                    )
                found[index] = replace(grant, memory=max(units.LEAST_LIMIT, grant.memory - left))
        return found

    def _note(self, at: str, step: str, others: list[str], *, new: bool) -> None:
        """Note that a step of a job has the filter, beside the cgroups of other pods. Raises RefusedError."""
        try:
            if slurm_steps.note(at, step, others, new=new):
                self._pods.isolate()
        except OSError as error:
            raise RefusedError(f"cgroup {step}: it cannot be noted: {error.strerror}; start the step again") from error

    def _cgroups(self, session: Session, step: Step) -> tuple[str, str]:
        """Return the cgroups that Slurm made for the job and the step; empty where none is in the version 2 tree."""
        with suppress(OSError):
            path = cgroup.of(session.peer.pid)
            at = job.cgroup_of(step.job, path)
            if session.process is not None and not has_ended(session.process):  # so the pid was not reused before
                return at, job.step_of(at, path)
        raise RefusedError(f"pod {step.pod}: its task has ended; start the step again")


def _given_at(at: str) -> dict[int, Grant]:
    """Return what an earlier daemon gave a pod, whose cgroup is ``at``; nothing if that is not noted."""
    try:
        return grants_from_json(json.loads(cgroup.get_xattr(at, _GIVEN) or "{}"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
