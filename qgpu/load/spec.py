"""What a load does, in words that a real GPU and the simulated one both understand.

It decides nothing about how kernels are launched or timed: the generator in this package does that with
CUDA, ``qgpu.planes.sim`` by arithmetic. Units are in the names; the dict form is what scenarios and the control
socket carry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from qgpu.errors import InvalidValueError

_LONGEST_US = 60e6
_LONGEST_S = 1e6
_MOST = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Workload:
    """Kernels of one length, how they are grouped, and when they come.

    ``batch`` kernels are launched, then synchronised, then the host thinks for ``gap_us``; with batch 0 the
    queue is kept full and synchronised rarely (an open flood). With ``period_us`` one batch starts each
    period, and its latency counts from the launch to the synchronisation.
    """

    kernel_us: float = 1000.0
    batch: int = 1
    gap_us: float = 0.0
    #: Time the host takes to launch each kernel of a batch, as a framework's; 0: all are launched at once.
    launch_us: float = 0.0
    #: 0: the next batch follows the last (closed loop).
    period_us: float = 0.0
    #: Launch each batch as one CUDA graph; the simulator makes no difference.
    graph: bool = False
    #: One kernel that runs until the end, ``kernel_us`` a round of it; the simulator takes it for a flood.
    persistent: bool = False
    #: Every block of the persistent kernel reads host memory after each round; the simulator makes no difference.
    host_reads: bool = False
    #: Kernels go round these CUDA streams; they fill the card one at a time, so the simulator needs one.
    streams: int = 1
    #: How long to measure, and how many kernels at most; 0 is no limit.
    duration_s: float = 0.0
    count: int = 0
    #: Run this long before measuring.
    warmup_s: float = 0.0
    #: Only for the simulator: kernels as (launched at, length) in µs, in order of launch, in place of all above.
    trace: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        _number("kernel_us", self.kernel_us, 0.1, _LONGEST_US)
        for name in ("gap_us", "launch_us", "period_us"):
            _number(name, getattr(self, name), 0, _LONGEST_US)
        for name in ("duration_s", "warmup_s"):
            _number(name, getattr(self, name), 0, _LONGEST_S)
        _integer("batch", self.batch, 0)
        _integer("streams", self.streams, 1)
        _integer("count", self.count, 0)
        for name in ("graph", "persistent", "host_reads"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidValueError(f"workload: {name} {value!r}: true or false, please")
        if self.persistent and (self.batch or self.graph or self.streams > 1):
            raise InvalidValueError(
                "workload: a persistent kernel is one kernel: no batch, no graph, one stream, please"
            )
        if self.host_reads and not self.persistent:
            raise InvalidValueError("workload: host_reads is for a persistent kernel")
        if self.period_us and not self.batch:
            raise InvalidValueError("workload: period_us needs a batch of at least 1, for it measures when batches end")
        if self.launch_us and (self.graph or not self.batch):
            raise InvalidValueError("workload: launch_us needs a batch of at least 1 and no graph, which is one launch")
        _check_trace(self.trace)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Workload:
        """Build a workload from its dict form. Raises InvalidValueError naming the key."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(str(key) for key in set(raw) - set(known))
        if unknown:
            raise InvalidValueError(f"workload: unknown key {unknown[0]!r}; there are {', '.join(known)}")
        values = dict(raw)
        if "trace" in values:
            values["trace"] = _pairs(values["trace"])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the dict form with every field; without ``trace`` where there is none."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        trace = values.pop("trace")
        return values | ({"trace": [list(pair) for pair in trace]} if trace else {})


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidValueError(f"workload: {name} {value!r}: a number, please")
    if not low <= value <= high:  # as is nothing that is not finite
        raise InvalidValueError(f"workload: {name} {value}: {low:g} to {high:g} is possible")


def _integer(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidValueError(f"workload: {name} {value!r}: a whole number, please")
    if not low <= value <= _MOST:
        raise InvalidValueError(f"workload: {name} {value}: {low} to {_MOST} is possible")


def _pairs(raw: object) -> tuple[tuple[float, float], ...]:
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise InvalidValueError("workload: trace: a list of [at_us, kernel_us] pairs, please")
    for pair in raw:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise InvalidValueError(f"workload: trace: {pair!r} is no [at_us, kernel_us] pair")
    return tuple((at, kernel) for at, kernel in raw)


def _check_trace(trace: tuple[tuple[float, float], ...]) -> None:
    last = 0.0
    for at_us, kernel_us in trace:
        _number("trace at_us", at_us, 0, _LONGEST_S * 1e6)
        _number("trace kernel_us", kernel_us, 0.1, _LONGEST_US)
        if at_us < last:
            raise InvalidValueError(f"workload: trace: {at_us:g} µs comes after {last:g} µs; launches go in order")
        last = at_us
