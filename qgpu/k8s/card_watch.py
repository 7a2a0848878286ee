"""Follows qgpud's cards, and wakes whoever publishes them or reports their health."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import structlog

from qgpu.errors import QgpuError
from qgpu.k8s.qgpud import Node, Qgpud

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


class CardWatch:
    """The cards as last seen, with a number that grows by every change."""

    def __init__(self, qgpud: Qgpud, grace_s: float = GRACE_S) -> None:
        self._qgpud = qgpud
        self._grace_s = grace_s
        self._changed = threading.Condition()
        self._sight, self._number, self._closed = Sight(), 0, False
        self._answered_s = time.monotonic()
        self._failing = False

    @property
    def sight(self) -> Sight:
        """Return what was last seen."""
        with self._changed:
            return self._sight

    @property
    def closed(self) -> bool:
        """Tell whether the watch has ended."""
        with self._changed:
            return self._closed

    def look(self) -> None:
        """Ask qgpud. A failure keeps what was seen, and is told after the grace period."""
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
        self._set(sight)

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

    def _set(self, sight: Sight) -> None:
        with self._changed:
            if sight != self._sight:
                self._sight = sight
                self._number += 1
                self._changed.notify_all()
