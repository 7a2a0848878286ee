"""What is for sale of each resource, as last seen; wakes whoever tells the kubelet."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import structlog

from qgpu.errors import QgpuError
from qgpu.k8s import unit_ledger
from qgpu.k8s.qgpud import Node, Qgpud
from qgpu.k8s.resources import Resource

_log = structlog.get_logger("k8s.units")

#: Of each card: its UUID, how many units it has, the numbers that are held, and how many more are for sale.
Units = Sequence[tuple[str, int, frozenset[int], int]]


class UnitStock:
    """The units of all resources, with a number that grows by every change."""

    def __init__(self, qgpud: Qgpud, served: Sequence[Resource], reserve: int) -> None:
        self._qgpud = qgpud
        self._served = served
        self._reserve = reserve
        self._changed = threading.Condition()
        self._units: dict[Resource, Units] = {}
        self._number, self._closed = 0, False
        self._failing = False
        #: Another driver that sells the same cards, see ``rivals``.
        self.rival = ""

    @property
    def closed(self) -> bool:
        """Tell whether the stock is closed."""
        with self._changed:
            return self._closed

    def of(self, resource: Resource) -> Units | None:
        """Return the units of a resource; None before qgpud has answered for the first time."""
        with self._changed:
            return self._units.get(resource)

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
        with self._changed:
            if units != self._units:
                self._units = units
                self._number += 1
                self._changed.notify_all()
        return node

    def look_now(self) -> None:
        """Ask qgpud after a change of our own."""
        with suppress(QgpuError):
            self.look()

    def wait(self, seen: int, timeout_s: float) -> int:
        """Wait until the number differs from ``seen``, or for this long; return the number."""
        with self._changed:
            self._changed.wait_for(lambda: self._number != seen or self._closed, timeout_s)
            return self._number

    def wake(self) -> None:
        """Wake all who wait, as if something had changed."""
        with self._changed:
            self._number += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all who wait, for good."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
