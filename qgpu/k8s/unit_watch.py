"""The units of each resource, as of qgpud's last answer; threads wait on it for changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from qgpu.errors import QgpuError
from qgpu.k8s import unit_usage
from qgpu.k8s.qgpud import Node, Qgpud
from qgpu.k8s.resources import Resource
from qgpu.k8s.unit_usage import Units
from qgpu.k8s.watched import Watched
from qgpu.linux.repeated_error import RepeatedError

_log = structlog.get_logger("k8s.units")


class UnitWatch(Watched[Mapping[Resource, Units]]):
    """The units of all resources; empty before qgpud has answered for the first time."""

    def __init__(self, qgpud: Qgpud, served: Sequence[Resource], reserve: int) -> None:
        super().__init__({})
        self._qgpud = qgpud
        self._served = served
        self._reserve = reserve
        self._failure = RepeatedError(_log, "no answer from qgpud, trying again", "warning")
        #: A driver that advertises the same cards (``conflicts``); "" if there is none.
        self.conflict = ""

    def of(self, resource: Resource) -> Units | None:
        """Return the units of a resource; None before qgpud has answered for the first time."""
        return self.value.get(resource)

    def poll(self) -> Node | None:
        """Ask qgpud and return its cards. If it does not answer, return None and keep the last value."""
        with self._failure.logged(QgpuError):
            node, grants = self._qgpud.node(), self._qgpud.grants()
        if self._failure.text:
            return None
        held = unit_usage.taken(grants, self._served)
        self.set(
            {
                resource: unit_usage.allocatable(resource, node.cards, self._reserve, grants, held, bool(self.conflict))
                for resource in self._served
            }
        )
        return node
