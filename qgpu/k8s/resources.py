"""The extended resources that the device plugin advertises, and what a unit of each stands for.

qgpu's own resources grant memory in proportion to time. Aliases are the resources of other systems: two names, one for
time and one for memory, which the kubelet allocates one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from qgpu.errors import InvalidValueError
from qgpu.k8s.names import DRIVER
from qgpu.k8s.qgpud import Card
from qgpu.model import Grant, PodClass

_MI = 1024**2
_PER_CENT = 100
#: Bytes of memory in the grant of a container's time units: a grant without memory would have no memory limit.
_BESIDE = _MI
#: The most units in one message to the kubelet, which takes 4 MiB at most.
MAX_UNITS = 50_000


class Kind(StrEnum):
    """Whether a unit is a part of a card's time or of its memory."""

    SHARE = "share"
    CORES = "cores"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Resource:
    """One extended resource."""

    name: str
    kind: Kind
    #: A container may ask for resources of one family together.
    family: str
    pod_class: PodClass = PodClass.OFFLINE
    #: Bytes of a unit of memory.
    unit: int = 0

    def units(self, card: Card, reserve: int) -> int:
        """Return how many units a card has."""
        return (card.memory - reserve) // self.unit if self.kind is Kind.MEMORY else _PER_CENT


class Alias(StrEnum):
    """Another system whose resource names can be served."""

    QGPU = "qgpu"
    HAMI = "hami"
    VCUDA = "vcuda"


#: The names for time (per cent) and memory, and the size of a unit of memory.
_ALIASES = {
    Alias.QGPU: ("tke.cloud.tencent.com/qgpu-core", "tke.cloud.tencent.com/qgpu-memory", 1024 * _MI),
    Alias.HAMI: ("nvidia.com/gpucores", "nvidia.com/gpumem", _MI),
    Alias.VCUDA: ("tencent.com/vcuda-core", "tencent.com/vcuda-memory", 256 * _MI),
}


def served(aliases: Iterable[Alias], memory_factor: int) -> list[Resource]:
    """Return the resources to serve; ``memory_factor`` multiplies the unit of HAMi's memory."""
    found = [
        Resource(f"{DRIVER}/cores", Kind.SHARE, DRIVER),
        Resource(f"{DRIVER}/online-cores", Kind.SHARE, f"{DRIVER}/online", PodClass.ONLINE),
    ]
    for alias in dict.fromkeys(aliases):
        cores, memory, unit = _ALIASES[alias]
        unit *= memory_factor if alias is Alias.HAMI else 1
        found += [Resource(cores, Kind.CORES, alias), Resource(memory, Kind.MEMORY, alias, unit=unit)]
    return found


def check_units(resources: Iterable[Resource], cards: Sequence[Card], reserve: int) -> None:
    """Raise InvalidValueError if a resource has more units than the kubelet takes."""
    for resource in resources:
        count = sum(resource.units(card, reserve) for card in cards)
        if count > MAX_UNITS:
            factor = -(-count // MAX_UNITS)
            raise InvalidValueError(
                f"{resource.name}: {count} units; the kubelet takes about {MAX_UNITS}: make a unit larger with "
                f"--memory-factor {factor}"
            )


def share_of_memory(card: Card, reserve: int, per_cent: int) -> int:
    """Return the bytes that go with ``per_cent`` of a card's time: whole MiB for each per cent."""
    return (card.memory - reserve) // _PER_CENT // _MI * _MI * per_cent


def grants_for_units(card: Card, reserve: int, units: Mapping[Resource, Iterable[int]]) -> dict[Resource, Grant]:
    """Return the grant of each resource for a container's units of one family; the container gets all of them.

    Units of time bring memory in proportion, unless the container has units of memory too. Raises InvalidValueError if
    that comes to no memory.
    """
    counts = {resource: len(set(numbers)) for resource, numbers in units.items()}
    memory = sum(resource.unit * count for resource, count in counts.items())
    beside = min(_BESIDE, memory // 2) if len(counts) > 1 else 0
    found = {}
    for resource, count in counts.items():
        if resource.kind is Kind.MEMORY:
            found[resource] = Grant(resource.pod_class, None, memory - beside)
        else:
            found[resource] = Grant(resource.pod_class, count, beside or share_of_memory(card, reserve, count))
    return found


def room(resource: Resource, card: Card, reserve: int, cores_left: int, memory_left: int) -> int:
    """Return how many more units of a resource fit on a card."""
    if resource.kind is Kind.MEMORY:
        return max(memory_left // resource.unit, 0)
    fits = max(cores_left, 0)
    if resource.kind is Kind.SHARE:
        fits = min(fits, max(memory_left // max(share_of_memory(card, reserve, 1), 1), 0))
    return fits
