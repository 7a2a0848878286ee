"""Online work over offline floods: its latency, and the speed that the floods keep."""

from __future__ import annotations

import statistics

from figures import Figure, at_least, at_most, median
from pods import Pod
from progress import Span
from rivals import QGPU, Way
from script import Script, listed
from service import Served, serve

_OFFLINE = ("1ms", "100ms")


def online(script: Script) -> list[Figure]:
    """Measure an online pod's latency alone and over one and four offline floods, and the floods' speed."""
    p99: dict[str, list[float]] = {"alone": []}
    kept: dict[str, list[float]] = {}
    with script.bench.daemon():
        script.bench.policy("best-effort")
        p99["alone"].append(_online_run(script).p99_us)
        for kernel in _OFFLINE:
            flood = script.bench.pod("flood", kernel)
            script.running(flood)
            alone = [script.span(2)]
            runs = [_online_run(script) for _ in range(2)]
            script.settle()
            alone.append(script.span(2))
            fours: list[Span] = []
            others: list[Pod] = []
            if kernel == "1ms":
                others = [script.bench.pod(f"flood{n}", kernel) for n in range(3)]
                script.running(*others)
                four_runs = [_online_run(script) for _ in range(2)]
                fours = [run.span for run in four_runs]
                p99["four"] = [run.p99_us for run in four_runs]
            done_others = [pod.stop() for pod in others]
            done = flood.stop()
            speed = statistics.mean(done.rate(span) for span in alone)
            p99[kernel] = [run.p99_us for run in runs]
            kept[kernel] = [done.rate(run.span) / speed for run in runs]
            if fours:
                kept["four"] = [sum(p.rate(span) for p in (done, *done_others)) / speed for span in fours]
            p99["alone"].append(_online_run(script).p99_us)
    for case, values in p99.items():
        script.say(f"online p99 {case}: {listed(values)} us; offline kept {listed(kept.get(case, []))}")
    return _online_figures(p99, kept)


def _online_run(script: Script) -> Served:
    return serve(Way(QGPU, script), "100us", 4.0)


def _online_figures(p99: dict[str, list[float]], kept: dict[str, list[float]]) -> list[Figure]:
    alone_us = statistics.median(p99["alone"])
    limit = at_most(alone_us + 300)
    note = "100 µs kernel every 10 ms, launch to synchronised; worst of the runs"
    figures = [median("online_alone_p99_us", p99["alone"], note="the same, no other pod, between the other runs")]
    cases = (*_OFFLINE, "four")
    figures += [median(f"online_p99_us_{case}", p99[case], *limit, note=note, pick=max) for case in cases]
    figures.append(median("online_p99_us", [max(p99[case]) for case in cases], *limit, note="worst case", pick=max))
    for case in cases:
        least = at_least(0.90 if case == "four" else 0.93)
        figures.append(median(f"offline_kept_{case}", kept[case], *least, note="over one offline pod alone"))
    one = [statistics.median(kept[case]) for case in _OFFLINE]
    figures.append(median("offline_kept", one, *at_least(0.93), note="least of one offline pod's", pick=min))
    return figures
