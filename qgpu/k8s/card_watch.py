"""Follows qgpud's cards, and wakes whoever publishes them or reports their health."""

from __future__ import annotations

import time
from dataclasses import dataclass

import structlog

from qgpu.errors import QgpuError
from qgpu.k8s.qgpud import Node, Qgpud
from qgpu.k8s.watched import Watched

_log = structlog.get_logger("k8s.cards")

#: How long qgpud may be silent before its cards count as out of reach: longer than a restart takes.
GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class Sight:
    """The last that is known of the cards."""

    #: None before qgpud has answered for the first time.
    node: Node | None = None
    #: Why qgpud's word is out of date; "" if it is not.
    trouble: str = ""


class CardWatch(Watched[Sight]):
    """The cards as last seen."""

    def __init__(self, qgpud: Qgpud, grace_s: float = GRACE_S) -> None:
        super().__init__(Sight())
        self._qgpud = qgpud
        self._grace_s = grace_s
        self._answered_s = time.monotonic()
        self._failing = False

    @property
    def sight(self) -> Sight:
        """Return what was last seen."""
        return self.value

    def look(self) -> None:
        """Ask qgpud. If it does not answer, keep what was seen; after the grace period say that it is out of date."""
        try:
            sight = Sight(self._qgpud.node())
            self._answered_s = time.monotonic()
            self._failing = False
        except QgpuError as error:
            if not self._failing:
                _log.warning("no answer from qgpud, trying again", error=str(error))
            self._failing, sight = True, self.sight
            if time.monotonic() - self._answered_s > self._grace_s:
                sight = Sight(sight.node, str(error))
        self.set(sight)
