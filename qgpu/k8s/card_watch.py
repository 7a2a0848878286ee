"""Polls qgpud for its cards; the publisher and the health stream wait on it for changes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import structlog

from qgpu.errors import QgpuError
from qgpu.k8s.qgpud import Node, Qgpud
from qgpu.k8s.watched import Watched
from qgpu.linux.repeated_error import RepeatedError

_log = structlog.get_logger("k8s.cards")

#: How long qgpud may be silent before its cards count as out of reach: longer than a restart takes.
GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class CardState:
    """The last known state of the cards."""

    #: None before qgpud has answered for the first time.
    node: Node | None = None
    #: Why ``node`` is out of date; "" if it is not.
    problem: str = ""


class CardWatch(Watched[CardState]):
    """Asks qgpud for its cards; the value is its last answer."""

    def __init__(self, qgpud: Qgpud, grace_s: float = GRACE_S) -> None:
        super().__init__(CardState())
        self._qgpud = qgpud
        self._grace_s = grace_s
        self._answered_s = time.monotonic()
        self._failure = RepeatedError(_log, "no answer from qgpud, trying again", "warning")

    def poll(self) -> None:
        """Ask qgpud. If it does not answer, keep its last answer, and mark it as out of date after the grace period."""
        state = self.value
        with self._failure.logged(QgpuError):
            state = CardState(self._qgpud.node())
            self._answered_s = time.monotonic()
        if (problem := self._failure.text) and time.monotonic() - self._answered_s > self._grace_s:
            state = CardState(state.node, problem)
        self.set(state)
