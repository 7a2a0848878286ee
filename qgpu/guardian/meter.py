"""The meter: context switches in, GPU time out. Pure; knows nothing of pods.

A context is resident from its start to its end, or to the next context's start. A context alone on the engine
stays resident while it idles, because nothing makes the hardware switch: its time is then an upper bound.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Event:
    """``who`` starts or stops being resident at ``at_ns``."""

    at_ns: int
    who: Hashable
    start: bool


@dataclass(slots=True)
class Use:
    """GPU time of one context since the last take."""

    run_ns: int = 0
    starts: int = 0


@dataclass(slots=True)
class Meter:
    """Time by context; ``resident`` is who holds the engine now."""

    resident: Hashable | None = None
    _since_ns: int = 0
    _uses: dict[Hashable, Use] = field(default_factory=dict)

    def advance(self, events: Iterable[Event], now_ns: int) -> None:
        """Take events in order, then charge whoever is resident up to ``now_ns``."""
        for event in events:
            self._charge(event.at_ns)
            if event.start:
                self.resident = event.who
                self._since_ns = max(self._since_ns, event.at_ns)
                self._use(event.who).starts += 1
            elif self.resident == event.who:
                self.resident = None
        self._charge(now_ns)

    def take(self) -> dict[Hashable, Use]:
        """Return the uses since the last take and begin anew."""
        uses, self._uses = self._uses, {}
        return uses

    def peek(self, who: Hashable) -> Use:
        """Look at one context's use since the last take."""
        return self._uses.get(who, Use())

    def _charge(self, until_ns: int) -> None:
        if self.resident is not None and until_ns > self._since_ns:
            self._use(self.resident).run_ns += until_ns - self._since_ns
        self._since_ns = max(self._since_ns, until_ns)

    def _use(self, who: Hashable) -> Use:
        return self._uses.setdefault(who, Use())
