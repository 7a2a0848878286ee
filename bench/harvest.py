"""(f) Offline work gained beside a periodic online service at 20, 50 and 80 % load, and what it costs the service.

    python bench/harvest.py

The service runs one kernel every 10 ms, of 2, 5 or 8 ms; an offline pod floods kernels of 1 ms. The service leaves the
rest of the card; the offline pod's part of that rest is its speed over its speed alone. Rivals: plain sharing, MPS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import clocks
from figures import NOTHING, Asked, Figure, at_least, at_most, median
from plots import Plot
from rivals import QGPU, Way, in_every_way
from script import Script, claim
from service import PERIOD_US, Served, serve

LOADS = (20, 50, 80)
#: At 80 % there is no requirement, only a measurement.
HELD = (20, 50)
SLOWER, ADDED_US, GAINED = 1.05, 250, 0.9


@dataclass(frozen=True, slots=True)
class ServiceResult:
    """The results of a service and of the offline pod beside it."""

    p99_us: float
    kept: float


def measure(script: Script) -> list[Figure]:
    """Measure the service alone, then over the flood in every way."""
    first = None if script.bench.simulated else clocks.read()
    script.calibrate(map(_kernel, LOADS))
    alone: dict[int, Served] = {}

    def beside(way: Way) -> dict[int, ServiceResult]:
        if way.name == QGPU:
            alone.update({load: serve(way, _kernel(load), 2.5) for load in LOADS})
        found = _beside(way)
        for load, served in found.items():
            script.say(
                f"{way.name:5} at {load} %: p99 {served.p99_us:.0f} us, alone {alone[load].p99_us:.0f}; "
                f"offline {served.kept:.3f} of its speed alone, {_gained(served, load):.3f} of what is left"
            )
        return found

    found = in_every_way(script, beside)
    script.plots += _plots(alone, found)
    figures = _figures(alone, found)
    if first is not None:
        figures.append(clocks.agreement(first, clocks.read()))
    return figures


def _beside(way: Way) -> dict[int, ServiceResult]:
    flood = way.start("flood", "1ms")
    way.running(flood)
    alone = way.script.span(1.2)
    served = {load: serve(way, _kernel(load), 3.5 if way.name == QGPU else 2.0) for load in LOADS}
    done = flood.stop()
    return {load: ServiceResult(s.p99_us, done.rate(s.span) / done.rate(alone)) for load, s in served.items()}


def _kernel(load: int) -> str:
    """Return the kernel that lasts this part of the time between two requests."""
    return f"{load * PERIOD_US // 100}us"


def _gained(served: ServiceResult, load: int) -> float:
    return served.kept / (1 - load / 100)


def _plots(alone: Mapping[int, Served], found: Mapping[str, Mapping[int, ServiceResult]]) -> list[Plot]:
    latency = {"alone": [(f"{load} %", alone[load].p99_us / 1000) for load in LOADS]}
    gained = {}
    for name, each in found.items():
        latency[name] = [(f"{load} %", served.p99_us / 1000) for load, served in each.items()]
        gained[name] = [(f"{load} %", _gained(served, load)) for load, served in each.items()]
    return [
        Plot("a service every 10 ms over an offline flood", "load of the service", "p99, ms", latency),
        Plot("what offline gained", "load of the service", "of what the service leaves", gained, (GAINED,)),
    ]


def _figures(alone: Mapping[int, Served], found: Mapping[str, Mapping[int, ServiceResult]]) -> list[Figure]:
    figures = [median(f"harvest_alone_p99_us_{load}", [alone[load].p99_us]) for load in LOADS]
    for name, each in found.items():
        tag = "" if name == QGPU else f"_{name.lower()}"
        for load, served in each.items():
            held = name == QGPU and load in HELD
            most = SLOWER * alone[load].p99_us + ADDED_US
            limit: Asked = at_most(most, " µs") if held else NOTHING
            note = f"{name}: a kernel of {load // 10} ms every 10 ms over a flood; {alone[load].p99_us:.0f} µs alone"
            figures.append(median(f"harvest_p99_us{tag}_{load}", [served.p99_us], *limit, note=note))
            limit = at_least(GAINED) if held else NOTHING
            note = f"{name}: offline's speed over one alone, over 1 - {load} %"
            figures.append(median(f"harvest_gained{tag}_{load}", [_gained(served, load)], *limit, note=note))
            lost_us = (1 - load / 100 - served.kept) * PERIOD_US
            note = f"{name}: what neither got, per request: the card switches twice, whatever the load"
            figures.append(median(f"harvest_lost_us{tag}_{load}", [lost_us], note=note))
    return figures


SECTIONS = {"harvest": measure}

if __name__ == "__main__":
    claim(SECTIONS, __doc__)
