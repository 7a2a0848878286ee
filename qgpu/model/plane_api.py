"""The one seam between deciding and doing: what every data plane offers the daemon.

There are two sides. A :class:`Backend` is time on one pGPU: four verbs, all that the loop knows. A
:class:`Host` is what lies around it: which pGPUs there are, which pods, and what each was granted. The
``sim``, ``seccomp`` and ``kmod`` planes each bring one of both, and one contract suite runs against all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qgpu.model import Grant, Plan, Sample


class Backend(Protocol):
    """Time on one pGPU."""

    #: Set to have samples say from when to when, and not only for how long. Costs time on both sides.
    detailed: bool

    @property
    def lost(self) -> int:
        """Count the context switches that the hardware dropped so far."""

    def sample(self) -> Sample:
        """Report what happened since the last call. Raises BackendGoneError when the plane is gone."""

    def apply(self, plan: Plan) -> None:
        """Take ``plan`` in place of the last one and renew the lease.

        Atomic from the caller's view: a refused plan (PlanRefused as RefusedError) leaves the old one in force.
        A pod of the plan that has gone meanwhile is skipped; a pod the plan does not name runs ungated with
        the driver's own timeslice.
        """

    def wait(self, timeout_ns: int) -> None:
        """Return after ``timeout_ns``, or earlier when pods or grants changed."""

    def close(self) -> None:
        """Give up the plan: every gate open, every timeslice the driver's own. Safe to call twice."""


@dataclass(frozen=True, slots=True)
class Pgpu:
    """One physical GPU as a plane knows it."""

    index: int
    uuid: str
    name: str
    memory: int
    #: The N of /dev/nvidiaN; None on the simulator.
    minor: int | None = None


@dataclass(frozen=True, slots=True)
class PodInfo:
    """One pod as a plane knows it, with what it was granted on each pGPU."""

    name: str
    grants: Mapping[int, Grant] = field(default_factory=dict)
    pids: tuple[int, ...] = ()
    #: Video memory held in bytes by pGPU, as far as the plane's register knows.
    memory: Mapping[int, int] = field(default_factory=dict)
    #: What the plane can't do for this pod, in words for a person; empty when all is well.
    trouble: str = ""
    #: Its cgroup (v2), such as "/qgpu/web"; empty where the plane has none, or it is gone.
    cgroup: str = ""
    #: How often it was refused memory, and calls that would have changed its share; None where nobody counts.
    refused_memory: int | None = None
    refused_calls: int | None = None
    #: Whether a process of it may live that could not be listed, or is not in its cgroup any more.
    alive: bool = False


class Host(Protocol):
    """The pGPUs and pods of one plane. Every verb raises a QgpuError with nothing half-done."""

    #: "sim", "seccomp" or "kmod".
    plane: str

    def pgpus(self) -> Sequence[Pgpu]:
        """List the pGPUs this plane can share."""

    def backend(self, pgpu: int) -> Backend:
        """Open the backend of one pGPU."""

    def pods(self) -> Sequence[PodInfo]:
        """List the pods the plane knows, also those from before this daemon started."""

    def admit(self, name: str, grants: Mapping[int, Grant], at: str = "") -> None:
        """Make a pod known with its grants (admission has been checked).

        ``at`` is a cgroup that is there already, such as a container's; empty for one of the pod's own, to be made.
        """

    def amend(self, name: str, grants: Mapping[int, Grant]) -> None:
        """Change a pod's grants."""

    def attach(self, name: str, pid: int, fds: Sequence[int]) -> None:
        """Bring a process that is about to become a pod's command into the pod.

        A process of a container is in its pod already; RefusedError if it is not. ``fds`` is what the plane's
        launcher made for it (seccomp: the listener); the host takes them over.
        """

    def retire(self, name: str) -> None:
        """Forget a pod. Its processes, if any are left, run on ungated; RefusedError where limits would end so."""

    def left_behind(self) -> Mapping[int, int]:
        """Return the video memory, in bytes by pGPU, that something keeps though its pod is no more."""

    def close(self) -> None:
        """Let go of the plane; pods run on ungated."""
