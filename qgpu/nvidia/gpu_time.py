"""Turns context switches into GPU time. Pure; knows nothing of pods.

A context is resident from its start to its end, or to the next context's start. A context that is alone on the engine
stays resident while it idles, because nothing makes the hardware switch. Its time is then an upper bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

#: A switch between two contexts takes 84 µs. A context that starts later than this after another one's end did not
#: preempt it.
HANDOVER_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class Event:
    """``context`` starts or stops being resident at ``at_ns``."""

    at_ns: int
    context: Hashable
    start: bool


@dataclass(frozen=True, slots=True)
class GpuTime:
    """GPU time of one context, how often it was switched in, and its longest completed turn."""

    run_ns: int = 0
    starts: int = 0
    longest_ns: int = 0

    def __add__(self, other: GpuTime) -> GpuTime:
        return GpuTime(self.run_ns + other.run_ns, self.starts + other.starts, max(self.longest_ns, other.longest_ns))


NOTHING = GpuTime()


@dataclass(slots=True)
class GpuTimeCounter:
    """GPU time by context; ``resident`` is the context on the engine, ``totals`` is all time so far."""

    resident: Hashable | None = None
    totals: dict[Hashable, GpuTime] = field(default_factory=dict)
    #: Spans charged to contexts, while recording; else None.
    spans: list[tuple[Hashable, int, int]] | None = None
    #: How often the engine switched straight from one context to another since the counts were taken.
    handovers: Counter[tuple[Hashable, Hashable]] = field(default_factory=Counter)
    _left_ns: int = 0
    #: Start of the resident context's turn.
    _began_ns: int = 0
    _before: Hashable | None = None
    _since_ns: int = 0
    #: GPU time since ``take`` was called.
    _uses: dict[Hashable, GpuTime] = field(default_factory=dict)

    def advance(self, events: Iterable[Event], now_ns: int) -> None:
        """Apply events in order, then charge the resident context up to ``now_ns``."""
        for event in events:
            self._charge(event.at_ns)
            if self.resident is not None and (event.start or self.resident == event.context):
                self._add(self.resident, GpuTime(longest_ns=max(0, event.at_ns - self._began_ns)))
            if event.start:
                self._began_ns = event.at_ns
                self._note_handover(event)
                self.resident = event.context
                self._add(event.context, GpuTime(starts=1))
            elif self.resident == event.context:
                self.resident, self._before, self._left_ns = None, event.context, event.at_ns
        self._charge(now_ns)

    def take(self, kept_as: Callable[[Hashable], Hashable | None] = lambda context: context) -> dict[Hashable, GpuTime]:
        """Return the GPU time since the last take.

        The totals of contexts that did nothing are added up by what each is ``kept_as``; None forgets them.
        """
        uses, self._uses = self._uses, {}
        before, self.totals = self.totals, {}
        for context, use in before.items():
            if (kept := context if context in uses else kept_as(context)) is not None:
                self.totals[kept] = self.totals.get(kept, NOTHING) + use
        return uses

    def record(self, wanted: bool) -> dict[Hashable, list[tuple[int, int]]]:
        """Return the spans charged since the last call, by context, and continue recording if ``wanted``."""
        found: dict[Hashable, list[tuple[int, int]]] = {}
        for context, start_ns, end_ns in self.spans or ():
            spans = found.setdefault(context, [])
            if spans and spans[-1][1] == start_ns:
                spans[-1] = (spans[-1][0], end_ns)
            else:
                spans.append((start_ns, end_ns))
        self.spans = [] if wanted else None
        return found

    def take_handovers(self) -> Counter[tuple[Hashable, Hashable]]:
        """Return the counts since the last call."""
        taken, self.handovers = self.handovers, Counter()
        return taken

    def _note_handover(self, event: Event) -> None:
        before = self.resident if self.resident is not None else self._before
        straight = self.resident is not None or event.at_ns - self._left_ns <= HANDOVER_NS
        if before is not None and before != event.context and straight:
            self.handovers[before, event.context] += 1

    def _charge(self, until_ns: int) -> None:
        if self.resident is not None and until_ns > self._since_ns:
            self._add(self.resident, GpuTime(run_ns=until_ns - self._since_ns))
            if self.spans is not None:
                self.spans.append((self.resident, self._since_ns, until_ns))
        self._since_ns = max(self._since_ns, until_ns)

    def _add(self, context: Hashable, use: GpuTime) -> None:
        for uses in (self.totals, self._uses):
            uses[context] = uses.get(context, NOTHING) + use
