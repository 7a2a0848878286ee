"""What the object table knows about a pod and about an RM client."""

from __future__ import annotations

from dataclasses import dataclass, field

from qgpu.model import Grant

#: How many descriptors of a client's file are recorded; others can be searched for (``control_file_search.py``).
MOST_USERS = 16

#: What the driver's checkpoint takes off a card but cannot put back (docs/decisions/0043-suspend.md).
UNRESTORABLE = IMPORTED, PEER_ACCESS = "memory of another process (CUDA IPC)", "peer access between cards"

#: Stands for all objects of a client: RM gives no object this handle.
ALL_OBJECTS = 0


@dataclass(slots=True)
class RmClientEntry:
    """One RM client of a pod, with the processes and descriptors that lead to its file."""

    pod: str
    #: The process that RM takes for its owner: the first process that used it.
    maker: int = 0
    #: Whether the guardian made it, so that RM takes the guardian for its owner.
    made_here: bool = False
    #: Whether another pod has taken it over.
    transferred: bool = field(default=False, compare=False)
    users: list[tuple[int, int]] = field(default_factory=list)
    #: How many notes of sharing RM keeps in it (``rm_share.py``).
    notes: int = 0
    #: How many mappings for the card it has (``dma_mappings.py``).
    dma_mappings: int = 0
    #: The handles of its context DMAs, with those of their memory; and those of host memory that may have been made for
    #: another card, with 0.
    memory_of: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class PodEntry:
    """A pod: its cgroup, its grants by pGPU index, and the cgroups of containers that count to it as well."""

    cgroup: str
    grants: dict[int, Grant] = field(default_factory=dict)
    joined: tuple[str, ...] = ()

    @property
    def cgroups(self) -> tuple[str, ...]:
        """Return all cgroups whose processes are the pod's."""
        return (self.cgroup, *self.joined)
