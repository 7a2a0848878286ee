"""The interface between policy and mechanism: what every data plane offers the daemon.

It has two sides. A :class:`Backend` shares time on one pGPU; the loop knows only its four verbs. A :class:`Host` knows
the pGPUs, the pods, and their grants. The ``sim``, ``seccomp`` and ``kmod`` planes implement one of each, and one
contract suite runs against all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from qgpu.model import Grant, Plan, Sample

if TYPE_CHECKING:
    from qgpu.model.checkpointer import Checkpointer


class Backend(Protocol):
    """Time on one pGPU."""

    #: Set it to get samples with start and end of every run, not only sums. Both sides need more time for that.
    detailed: bool

    @property
    def lost(self) -> int:
        """Return how many context switches the hardware dropped from its log so far."""

    def sample(self) -> Sample:
        """Return what happened since the last call. Raises BackendGoneError if the plane is gone."""

    def apply(self, plan: Plan) -> None:
        """Replace the last plan by ``plan`` and renew the lease.

        Atomic for the caller: a plan that raises RefusedError leaves the old one in force. A pod of the plan that no
        longer exists is skipped. A pod that the plan does not name runs ungated with the driver's own timeslice.
        """

    def wait(self, timeout_ns: int) -> None:
        """Return after ``timeout_ns``, or earlier if pods or grants change."""

    def close(self) -> None:
        """Give up the plan: open every gate and restore the driver's own timeslices. Safe to call twice."""


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A compute instance of a card in MIG mode: the numbers of card, GPU instance and compute instance."""

    card: int
    gpu_instance: int
    compute_instance: int = 0

    @property
    def index(self) -> int:
        """Return its number as a pGPU, which no card has, and which stays whatever other instances come and go."""
        return 100 * (self.card + 1) + self.gpu_instance


@dataclass(frozen=True, slots=True)
class Pgpu:
    """One physical GPU as a plane knows it, or one MIG instance of it."""

    index: int
    uuid: str
    name: str
    memory: int
    #: The N of /dev/nvidiaN; None on the simulator.
    minor: int | None = None
    mig: MigInstance | None = None


@dataclass(frozen=True, slots=True)
class ExcludedCard:
    """A card of this machine that is no pGPU, and the reason as text for a person."""

    #: Its number at nvidia-smi. No pGPU has this number.
    index: int
    #: Its address, such as "00000000:3b:00.0".
    pci: str
    why: str


@dataclass(frozen=True, slots=True)
class PodInfo:
    """One pod as a plane knows it, with its grants by pGPU."""

    name: str
    grants: Mapping[int, Grant] = field(default_factory=dict)
    pids: tuple[int, ...] = ()
    #: Card memory it holds, in bytes by pGPU, as far as the plane's object table knows.
    memory: Mapping[int, int] = field(default_factory=dict)
    #: What the plane cannot do for this pod, as text for a person; empty if all is well.
    problem: str = ""
    #: Its cgroup (v2), such as "/qgpu/web"; empty if the plane has none for it, or the cgroup is gone.
    cgroup: str = ""
    #: How many allocations of memory, and how many calls that would have changed its share, were refused. None where
    #: the plane does not count.
    refused_memory: int | None = None
    refused_calls: int | None = None
    #: Whether a process of it may be alive that could not be listed, or has left its cgroup.
    alive: bool = False
    #: The cgroups of containers that count to this pod as well; some may be gone.
    joined: tuple[str, ...] = ()
    #: What the driver would take off a card with its processes but could not put back, in words ("peer access between
    #: cards"). None where the plane does not see it.
    unrestorable: tuple[str, ...] | None = None

    @property
    def memory_granted(self) -> dict[int, int]:
        """Return the memory that it holds on cards of its grants; what it left elsewhere is not its own any more."""
        return {index: size for index, size in self.memory.items() if size and index in self.grants}

    @property
    def cgroups(self) -> tuple[str, ...]:
        """Return its own cgroup, if it has one, and those that count to it."""
        return (*filter(None, [self.cgroup]), *self.joined)


class Host(Protocol):
    """The pGPUs and pods of one plane. A verb that fails raises a QgpuError and changes nothing."""

    #: "sim", "seccomp" or "kmod".
    plane: str

    def pgpus(self) -> Sequence[Pgpu]:
        """Return the pGPUs that this plane can share."""

    def excluded_cards(self) -> Sequence[ExcludedCard]:
        """Return the cards of this machine that the plane does not share."""
        return ()

    def backend(self, pgpu: int) -> Backend:
        """Open the backend of one pGPU."""

    def pods(self) -> Sequence[PodInfo]:
        """Return the pods that the plane knows, including those from before this daemon started."""

    def admit(self, name: str, grants: Mapping[int, Grant], at: str = "") -> None:
        """Add a pod with its grants. The caller has checked admission.

        ``at`` is an existing cgroup, such as a container's. If it is empty, the plane makes one for the pod.
        """

    def amend(self, name: str, grants: Mapping[int, Grant]) -> None:
        """Change a pod's grants."""

    def attach(self, name: str, pid: int, fds: Sequence[int]) -> None:
        """Move a process that is about to exec a pod's command into the pod.

        A container's process must be in its pod already; RefusedError if it is not. ``fds`` are descriptors that the
        plane's launcher made for it (seccomp: the listener). The host owns them from now on.
        """

    def join(self, name: str, cgroups: Sequence[str]) -> None:
        """Let exactly these containers' cgroups count to a pod besides its own. NotSupportedError where none can."""

    def retire(self, name: str) -> None:
        """Remove a pod, if it is there. Processes that are left run on ungated.

        Raises RefusedError if they would escape a limit that way.
        """

    def orphaned_memory(self) -> Mapping[int, int]:
        """Return the card memory, in bytes by pGPU, that is still held on behalf of pods that no longer exist.

        Empty where a pod's memory is freed with the pod.
        """
        return {}

    def names_in_use(self) -> Collection[str]:
        """Return the names of pods that no longer exist and that a new pod may not have, or may not have yet.

        Empty where a pod leaves nothing under its name.
        """
        return ()

    def checkpointer(self) -> Checkpointer:
        """Open what takes processes off the cards, for one operation. Raises NotSupportedError."""

    def close(self) -> None:
        """Release the plane. Pods run on ungated."""
