"""Reads one card's GPU time: its context-switch log, its clock and the counter together.

Both planes on real hardware use it. A context is identified by (context, pid), as in the log; the callers map it to a
pod.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from qgpu.model import Span
from qgpu.nvidia.ctxsw_log import START, ContextSwitches
from qgpu.nvidia.gpu_time import NOTHING, Event, GpuTime, GpuTimeCounter
from qgpu.nvidia.rm_device import RmDevice

K = TypeVar("K", bound=Hashable)

#: The uncertainty of reading two clocks with an RM call in between; a smaller step between them is ignored.
_CLOCK_STEP_NS = 50_000


@dataclass(frozen=True, slots=True)
class GpuTimeReading(Generic[K]):
    """What the contexts of each owner did between two calls of ``read``."""

    uses: Mapping[K, GpuTime]
    #: When the contexts of each owner ran, in order.
    runs: Mapping[K, list[Span]]
    #: How often the engine switched straight from one owner's context to another's.
    handovers: Counter[tuple[K, K]]
    #: The owner of the context on the engine.
    resident: K | None


@dataclass(slots=True)
class GpuTimeReader:
    """GPU time of one card up to the last drain."""

    device: RmDevice
    log: ContextSwitches
    counter: GpuTimeCounter = field(default_factory=GpuTimeCounter)
    #: The card's clock minus CLOCK_MONOTONIC.
    _ahead_ns: int = 0

    def drain(self) -> None:
        """Move context switches from the log to the counter. Raises RmError or OSError if the card fails."""
        switches = self.log.read()
        now_ns = self.device.time_ns()
        self.counter.advance([Event(s.at_ns, (s.context, s.pid), s.tag == START) for s in switches], now_ns)

    def read(
        self,
        owner: Callable[[Hashable], K | None],
        *,
        detailed: bool,
        kept_as: Callable[[Hashable], Hashable | None] = lambda context: context,
    ) -> GpuTimeReading[K]:
        """Return what each owner's contexts did since the last call.

        The totals of contexts that did nothing are added up by what each is ``kept_as``, a context of the same owner,
        or forgotten if that is None.
        If this call and the last one are ``detailed``, it lists when they ran, on CLOCK_MONOTONIC. Raises RmError or
        OSError if the card fails.
        """
        uses: dict[K, GpuTime] = {}
        taken = self.counter.take(lambda context: kept_as(context) if owner(context) is not None else None)
        for context, use in taken.items():
            if (mine := owner(context)) is not None:
                uses[mine] = uses.get(mine, NOTHING) + use
        runs: dict[K, list[Span]] = {}
        for context, spans in self._runs(wanted=detailed).items():
            if (mine := owner(context)) is not None:
                runs[mine] = sorted(runs.get(mine, []) + spans)
        handovers: Counter[tuple[K, K]] = Counter()
        for pair, count in self.counter.take_handovers().items():
            before, after = map(owner, pair)
            if before is not None and after is not None:
                handovers[before, after] += count
        return GpuTimeReading(uses, runs, handovers, owner(self.counter.resident))

    def _runs(self, *, wanted: bool) -> dict[Hashable, list[Span]]:
        """Return when contexts ran since the last call, if that was ``wanted`` then."""
        spans = self.counter.record(wanted)
        if not spans:
            return {}
        before_ns, gpu_ns, after_ns = time.monotonic_ns(), self.device.time_ns(), time.monotonic_ns()
        ahead_ns = gpu_ns - (before_ns + after_ns) // 2
        if abs(ahead_ns - self._ahead_ns) > _CLOCK_STEP_NS:
            self._ahead_ns = ahead_ns
        return {
            context: [(start_ns - self._ahead_ns, end_ns - self._ahead_ns) for start_ns, end_ns in found]
            for context, found in spans.items()
        }
