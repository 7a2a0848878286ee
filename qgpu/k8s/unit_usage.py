"""Which units of which card are taken, as qgpud's prepared grants say, and how many more fit.

Several resources stand for the same cards. So a unit that no container holds counts as healthy only while the card has
room for it: each allocation of one resource leaves fewer healthy units of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qgpu.k8s import resources
from qgpu.k8s.device_units import is_device_plugins, named_units
from qgpu.k8s.qgpud import Card
from qgpu.k8s.resources import Resource

#: Of each card: its UUID, how many units it has, the numbers that are held, and how many more can be allocated.
Units = Sequence[tuple[str, int, frozenset[int], int]]


@dataclass(frozen=True, slots=True)
class HeldUnits:
    """The units that one grant stands for."""

    uid: str
    card: str
    #: None: the resource is not served any more.
    resource: Resource | None
    numbers: frozenset[int]

    def overlaps(self, resource: Resource, card: str, numbers: Iterable[int]) -> bool:
        """Tell whether it holds one of these units of a resource."""
        return (resource, card) == (self.resource, self.card) and not self.numbers.isdisjoint(numbers)


def taken(grants: Iterable[Mapping[str, Any]], served: Sequence[Resource]) -> list[HeldUnits]:
    """Return the units of the device plugin's grants."""
    by_name = {resource.name: resource for resource in served}
    found = []
    for grant in grants:
        if is_device_plugins(grant["uid"]):
            (device,) = grant["devices"]
            resource = by_name.get(device["request"])
            found.append(HeldUnits(grant["uid"], device["gpu"], resource, named_units(grant["name"])))
    return found


def allocatable(
    resource: Resource,
    cards: Sequence[Card],
    reserve: int,
    grants: Sequence[Mapping[str, Any]],
    held: Sequence[HeldUnits],
    closed: bool,
) -> Units:
    """Return the units of a resource by card; if ``closed``, no more of them can be allocated."""
    found = []
    for card in cards:
        devices = [each for grant in grants for each in grant["devices"] if each["gpu"] == card.uuid]
        cores_left = 100 - card.held_cores - sum(each["cores"] or 0 for each in devices)
        memory_left = card.memory - reserve - card.held_memory - sum(each["memory"] or 0 for each in devices)
        mine = frozenset[int]().union(
            *(each.numbers for each in held if (each.resource, each.card) == (resource, card.uuid))
        )
        more = 0 if closed or card.problem else resources.room(resource, card, reserve, cores_left, memory_left)
        count = resource.units(card, reserve)
        found.append((card.uuid, count, mine, min(more, count - len(mine))))
    return found
