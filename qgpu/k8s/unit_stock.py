"""What is for sale of each resource, as last seen; wakes whoever tells the kubelet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import structlog

from qgpu.errors import QgpuError
from qgpu.k8s import unit_ledger
from qgpu.k8s.qgpud import Node, Qgpud
from qgpu.k8s.resources import Resource
from qgpu.k8s.watched import Watched

_log = structlog.get_logger("k8s.units")

#: Of each card: its UUID, how many units it has, the numbers that are held, and how many more are for sale.
Units = Sequence[tuple[str, int, frozenset[int], int]]


class UnitStock(Watched[Mapping[Resource, Units]]):
    """The units of all resources; empty before qgpud has answered for the first time."""

    def __init__(self, qgpud: Qgpud, served: Sequence[Resource], reserve: int) -> None:
        super().__init__({})
        self._qgpud = qgpud
        self._served = served
        self._reserve = reserve
        self._failing = False
        #: Another driver that sells the same cards, see ``rivals``.
        self.rival = ""

    def of(self, resource: Resource) -> Units | None:
        """Return the units of a resource; None before qgpud has answered for the first time."""
        return self.value.get(resource)

    def look(self) -> Node | None:
        """Ask qgpud; a failure keeps what was seen. Returns what it said of the cards."""
        try:
            node, grants = self._qgpud.node(), self._qgpud.grants()
        except QgpuError as error:
            if not self._failing:
                _log.warning("no answer from qgpud, trying again", error=str(error))
            self._failing = True
            return None
        self._failing = False
        held = unit_ledger.taken(grants, self._served)
        units: dict[Resource, Units] = {}
        for resource in self._served:
            found = unit_ledger.healthy(resource, node.cards, self._reserve, grants, held)
            units[resource] = [
                (card.uuid, resource.units(card, self._reserve), mine, 0 if self.rival else more)
                for card in node.cards
                for mine, more in [found[card.uuid]]
            ]
        self.set(units)
        return node

    def look_now(self) -> None:
        """Ask qgpud after a change of our own."""
        with suppress(QgpuError):
            self.look()
