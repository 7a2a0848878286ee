"""One card's GPU time as it passes: its log of context switches, its clock and the meter, read together.

Both planes on real hardware measure by it. A context is told by (context, pid), as the log has it; whose pod that is,
is its callers' business.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field

from qgpu.model import Span
from qgpu.rm.device import RmDevice
from qgpu.rm.meter import Event, Meter
from qgpu.rm.switches import START, SwitchLog

#: Reading two clocks is this uncertain (an RM call lies in between); a smaller step between them is no news.
_CLOCK_STEP_NS = 50_000


@dataclass(slots=True)
class Watch:
    """Context switches of one card, metered up to the last drain."""

    device: RmDevice
    log: SwitchLog
    meter: Meter = field(default_factory=Meter)
    #: How far the card's clock is ahead of CLOCK_MONOTONIC.
    _ahead_ns: int = 0

    def drain(self) -> None:
        """Move context switches from the log to the meter. Raises RmError or OSError where the card fails."""
        switches = self.log.read()
        now_ns = self.device.time_ns()
        self.meter.advance([Event(s.at_ns, (s.context, s.pid), s.tag == START) for s in switches], now_ns)

    def runs(self, *, wanted: bool) -> dict[Hashable, list[Span]]:
        """Return who ran when since the last call, on CLOCK_MONOTONIC, if that was ``wanted`` then."""
        spans = self.meter.record(wanted)
        if not spans:
            return {}
        before_ns, gpu_ns, after_ns = time.monotonic_ns(), self.device.time_ns(), time.monotonic_ns()
        ahead_ns = gpu_ns - (before_ns + after_ns) // 2
        if abs(ahead_ns - self._ahead_ns) > _CLOCK_STEP_NS:
            self._ahead_ns = ahead_ns
        return {
            who: [(start_ns - self._ahead_ns, end_ns - self._ahead_ns) for start_ns, end_ns in found]
            for who, found in spans.items()
        }
