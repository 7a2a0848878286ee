"""What a load does: one description for real and simulated GPUs.

It does not say how kernels are launched or timed: the generator in this package does that with CUDA,
``qgpu.planes.sim`` by arithmetic. Names contain the units. Scenarios and the control socket carry the dict form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from qgpu.errors import InvalidValueError

_LONGEST_US = 60e6
_LONGEST_S = 1e6
_MOST = 1_000_000_000
_MOST_MEMORY = 1 << 50


@dataclass(frozen=True, slots=True)
class Workload:
    """Kernels of one length, how they are grouped, and when they are launched.

    The host launches ``batch`` kernels, synchronises, and pauses for ``gap_us``. With batch 0 it keeps the queue full
    and rarely synchronises (a flood). With ``period_us`` one batch starts each period, and its latency is the time
    from launch to synchronisation.
    """

    kernel_us: float = 1000.0
    batch: int = 1
    gap_us: float = 0.0
    #: Host time to launch each kernel of a batch, like a framework's; 0: all are launched at once.
    launch_us: float = 0.0
    #: 0: the next batch follows the last (closed loop).
    period_us: float = 0.0
    #: Launch each batch as one CUDA graph; the simulator ignores it.
    graph: bool = False
    #: One kernel that runs until the end in rounds of ``kernel_us``; the simulator runs a flood instead.
    persistent: bool = False
    #: Every block of the persistent kernel reads host memory after each round; the simulator ignores it.
    host_reads: bool = False
    #: Kernels are spread over these CUDA streams. Each fills the card alone, so the simulator needs only one.
    streams: int = 1
    #: How long to measure, and how many kernels at most; 0 is no limit.
    duration_s: float = 0.0
    count: int = 0
    #: Run this long before measuring.
    warmup_s: float = 0.0
    #: Card memory in bytes that the process holds besides what its kernels need.
    memory: int = 0
    #: For the simulator only: kernels as (launch time, length) in µs, in order of launch. Replaces all of the above.
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
        _integer("memory", self.memory, 0, _MOST_MEMORY)
        for name in ("graph", "persistent", "host_reads"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidValueError(f"workload: {name} {value!r}: must be true or false")
        if self.persistent and (self.batch or self.graph or self.streams > 1):
            raise InvalidValueError("workload: a persistent kernel needs batch 0, no graph and one stream")
        if self.host_reads and not self.persistent:
            raise InvalidValueError("workload: host_reads needs a persistent kernel")
        if self.period_us and not self.batch:
            raise InvalidValueError("workload: period_us needs a batch of at least 1: it measures when batches end")
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
        """Return the dict form with every field, but without an empty ``trace``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        trace = values.pop("trace")
        return values | ({"trace": [list(pair) for pair in trace]} if trace else {})


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidValueError(f"workload: {name} {value!r}: must be a number")
    if not low <= value <= high:  # also rejects nan and infinities
        raise InvalidValueError(f"workload: {name} {value}: must be {low:g} to {high:g}")


def _integer(name: str, value: object, low: int, high: int = _MOST) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidValueError(f"workload: {name} {value!r}: must be a whole number")
    if not low <= value <= high:
        raise InvalidValueError(f"workload: {name} {value}: must be {low} to {high}")


def _pairs(raw: object) -> tuple[tuple[float, float], ...]:
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise InvalidValueError("workload: trace: must be a list of [at_us, kernel_us] pairs")
    for pair in raw:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise InvalidValueError(f"workload: trace: {pair!r} is not an [at_us, kernel_us] pair")
    if not raw:
        raise InvalidValueError("workload: trace: it is empty; give pairs, or leave it out")
    return tuple((at, kernel) for at, kernel in raw)


def _check_trace(trace: tuple[tuple[float, float], ...]) -> None:
    last = 0.0
    for at_us, kernel_us in trace:
        _number("trace at_us", at_us, 0, _LONGEST_S * 1e6)
        _number("trace kernel_us", kernel_us, 0.1, _LONGEST_US)
        if at_us < last:
            raise InvalidValueError(f"workload: trace: {at_us:g} µs comes after {last:g} µs; launches go in order")
        last = at_us
