"""(c) Online work over offline floods: added latency, and the speed that the floods keep; beside rivals.

    python bench/online_latency.py
    python bench/online_latency.py --only online_processes  # over one pod of four processes

Online: a kernel of 100 µs every 10 ms, its latency from launch to synchronised. Offline: one pod or four that flood
kernels of 50 µs, 1 ms or 100 ms. Rivals (plain sharing and MPS) run only some of these cases, because all would take
minutes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import clocks
from figures import NOTHING, Asked, Figure, at_least, at_most, median
from plots import Plot
from pods import stop_all
from progress import Span
from rivals import QGPU, Way, in_every_way
from script import Script, claim, listed
from service import Served, serve

ADDED_US = 250
KEPT = 0.93
FLOODS = ("50us", "1ms", "100ms")
#: The floods that rivals are measured with, by one pod and by four.
BESIDE, FOUR_BESIDE = ("1ms", "100ms"), ("1ms",)
PROCESSES = 4
#: How long latency and speed are measured, in s: qgpu, four pods with kernels of 100 ms under qgpu, and rivals. Each of
#: those pods ends some two kernels a second, so one more or less within 4 s would change its speed by an eighth.
_QGPU_S, _FOUR_LONG_S, _RIVAL_S = 4.0, 12.0, 1.5


@dataclass(slots=True)
class Case:
    """An online pod over some floods: p50 and p99 of each run, and the part of their speed that the floods kept."""

    p50_us: list[float] = field(default_factory=list)
    p99_us: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)


def measure(script: Script) -> list[Figure]:
    """Measure alone, then every way to share."""
    first = None if script.bench.simulated else clocks.read()
    alone = Case()

    def cases_of(way: Way) -> dict[str, Case]:
        _noted(alone, serve(way, "100us", 2.0))
        return _cases(way)

    cases = in_every_way(script, cases_of)
    script.say(f"alone: p50 {listed(alone.p50_us)} p99 {listed(alone.p99_us)} us")
    script.plots += _plots(alone, cases)
    figures = _figures(alone, cases)
    if first is not None:
        figures.append(clocks.agreement(first, clocks.read()))
    return figures


def processes(script: Script) -> list[Figure]:
    """Measure over one offline pod of several processes; the hardware gives each process a turn."""
    alone = Case()
    found = in_every_way(script, lambda way: _over_processes(way, alone))
    note = f"100 µs every 10 ms over one pod of {PROCESSES} processes that flood 1 ms; "
    figures = []
    for name, case in found.items():
        tag = "" if name == QGPU else f"_{name.lower()}"
        added = [p99_us - statistics.median(alone.p99_us) for p99_us in case.p99_us]
        told = f"{name}: {note}p99 over that alone"
        figures.append(median(f"online_processes_p99_added_us{tag}", added, note=told))
        told = f"{name}: {note}over one process alone"
        figures.append(median(f"online_processes_kept{tag}", case.kept, note=told))
    return figures


def _over_processes(way: Way, alone: Case) -> Case:
    """Measure a service alone, one process alone, and the service over several."""
    _noted(alone, serve(way, "100us", 2.0))
    single = way.start("single", "1ms")
    way.running(single)
    span = way.script.span(1.0)
    rate = single.stop().rate(span)
    case = Case()
    several = way.start("flood", "1ms", "--processes", f"{PROCESSES}")
    way.running(several)
    spans = [_noted(case, serve(way, "100us", 3.0)) for _ in range(2)]
    done = several.stop()
    case.kept += [done.rate(during) / rate for during in spans]
    latency = f"p99 {listed(case.p99_us)} us, alone {alone.p99_us[-1]:.0f}"
    way.script.say(f"{way.name:5} over {PROCESSES} processes: {latency}; kept {listed(case.kept)}")
    return case


def _cases(way: Way) -> dict[str, Case]:
    seconds = _QGPU_S if way.name == QGPU else _RIVAL_S
    cases: dict[str, Case] = {}
    for kernel in FLOODS if way.name == QGPU else BESIDE:
        one, four = Case(), Case()
        flood = way.start("flood", kernel)
        way.running(flood)
        alone = way.script.span(2.0 if kernel == "100ms" else 1.0)
        span = _noted(one, serve(way, "100us", seconds))
        others, spans = [], []
        if way.name == QGPU or kernel in FOUR_BESIDE:
            others = [way.start(f"flood{n}", kernel) for n in range(3)]
            way.running(*others)
            spans.append(_noted(four, serve(way, "100us", _FOUR_LONG_S if kernel == "100ms" else seconds)))
        done, *rest = stop_all(flood, *others)
        one.kept.append(done.rate(span) / done.rate(alone))
        four.kept += [sum(each.rate(during) for each in (done, *rest)) / done.rate(alone) for during in spans]
        found = {f"1 of {kernel}": one, **({f"4 of {kernel}": four} if spans else {})}
        for case, each in found.items():
            latency = f"p50 {listed(each.p50_us)} p99 {listed(each.p99_us)} us"
            way.script.say(f"{way.name:5} over {case}: {latency}; kept {listed(each.kept)}")
        cases |= found
    return cases


def _noted(case: Case, served: Served) -> Span:
    """Record the online pod's latency in this case and return when it was busy."""
    case.p50_us.append(served.p50_us)
    case.p99_us.append(served.p99_us)
    return served.span


def _plots(alone: Case, cases: Mapping[str, Mapping[str, Case]]) -> list[Plot]:
    middle = statistics.median(alone.p99_us)
    latency: dict[str, Sequence[tuple[str, float]]] = {}
    kept: dict[str, Sequence[tuple[str, float]]] = {}
    for name, found in cases.items():
        latency[name] = [(case, max(each.p99_us) - middle) for case, each in found.items()]
        kept[name] = [(case, min(each.kept)) for case, each in found.items()]
    what = "online: 100 µs every 10 ms, over offline floods"
    return [
        Plot(what, "", "p99 added to that alone, µs", latency, (ADDED_US,), log_y=True),
        Plot(what, "", "floods' speed over one alone", kept, (KEPT,)),
    ]


def _figures(alone: Case, cases: Mapping[str, Mapping[str, Case]]) -> list[Figure]:
    middle = statistics.median(alone.p99_us)
    note = "100 µs kernel every 10 ms, launch to synchronised"
    figures = [median("online_alone_p99_us", alone.p99_us, note=f"{note}, no other load, between the other runs")]
    for name, found in cases.items():
        tag = "" if name == QGPU else f"_{name.lower()}"
        ours = name == QGPU
        most: Asked = at_most(ADDED_US, " µs") if ours else NOTHING
        least: Asked = at_least(KEPT) if ours else NOTHING
        added = {case: max(each.p99_us) - middle for case, each in found.items()}
        kept = {case: min(each.kept) for case, each in found.items()}
        worst, poorest = max(added, key=lambda case: added[case]), min(kept, key=lambda case: kept[case])
        told = f"{name}: {note}; p99 over that alone; worst: {worst}"
        figures.append(median(f"online_p99_added_us{tag}", list(added.values()), *most, note=told, pick=max))
        told = f"{name}: over one alone; least: {poorest}"
        figures.append(median(f"offline_kept{tag}", list(kept.values()), *least, note=told, pick=min))
        for case in found:
            short = case.replace(" of ", "x")
            figures.append(median(f"online_p99_added_us{tag}_{short}", [added[case]], *most, note=f"{name}: {note}"))
            figures.append(median(f"offline_kept{tag}_{short}", [kept[case]], *least, note=f"{name}: over one alone"))
    return figures


SECTIONS = {"online_latency": measure, "online_processes": processes}

if __name__ == "__main__":
    claim(SECTIONS, __doc__)
