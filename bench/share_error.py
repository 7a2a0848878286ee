"""(b) How far shares are off their quotas, over windows of 100 ms and 1 s, for mixes that keep the card busy.

    python bench/share_error.py

Burst Share, with quotas that add up to about 100. Shares are parts of true GPU time, as the ledger computes it from
context switches; the kernels that the pods finished serve as a check. A mix has two seconds to settle; convergence.py
measures what happens before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from figures import NOTHING, Asked, Figure, at_most, median
from plots import Plot
from pods import stop_all
from progress import Progress, Span
from script import Script, claim, listed
from usage import Tick, errors_pp, watch, windows

from qgpu.load.stats import percentile
from qgpu.model import NS_PER_MS, NS_PER_S, NS_PER_US
from qgpu.units import parse_duration

LIMIT_PP = 1.0
WINDOWS_NS = {"100ms": 100 * NS_PER_MS, "1s": NS_PER_S}


@dataclass(frozen=True, slots=True)
class Load:
    """A pod of a mix: its quota and what it does."""

    cores: int
    kernel: str
    options: tuple[str, ...] = ()
    #: Whether the lengths of its kernels add up to its GPU time.
    counts: bool = True


_GRAPH, _STREAMS = ("--graph",), ("--streams", "8")
_BATCHES = ("--batch", "5", "--gap", "50us")

MIXES: dict[str, Sequence[Load]] = {
    "2: 95+5, 1 ms": (Load(95, "1ms"), Load(5, "1ms")),
    "2: 70+30, 5 µs graphs, 100 ms": (Load(70, "5us", _GRAPH, counts=False), Load(30, "100ms")),
    "2: 66+33, batches of 5 ms": (Load(66, "1ms", _BATCHES), Load(33, "1ms", _BATCHES)),
    "2: 60+40, 4 processes, 1": (Load(60, "1ms", ("--processes", "4")), Load(40, "1ms")),
    "3: 50+30+20, persistent, flood, graphs": (
        Load(50, "1ms", ("--persistent",)),
        Load(30, "1ms"),
        Load(20, "50us", _GRAPH, counts=False),
    ),
    "4: 40+30+20+10, 50 µs to 100 ms": (
        Load(40, "50us"),
        Load(30, "100ms"),
        Load(20, "1ms", _STREAMS, counts=False),
        Load(10, "50us", _GRAPH),
    ),
    "8: 30+20+15+10+10+5+5+5": tuple(Load(cores, "1ms") for cores in (30, 20, 15, 10, 10, 5, 5, 5)),
    "16: 4x10+12x5": tuple(Load(cores, "1ms") for cores in (10,) * 4 + (5,) * 12),
    "3: 50+30+20, persistent that reads host memory a lot, flood, graphs": (
        Load(50, "1ms", ("--persistent", "--host-reads")),
        Load(30, "1ms"),
        Load(20, "50us", _GRAPH, counts=False),
    ),
}


def measure(script: Script) -> list[Figure]:
    """Run every mix under one daemon."""
    script.calibrate(["5us"])
    found: dict[str, dict[str, list[float]]] = {}
    off: dict[str, float] = {}
    dry: dict[str, int] = {}
    with script.bench.daemon():
        for name, mix in MIXES.items():
            ticks, done, span = _run(script, mix)
            quotas = {f"p{n}": load.cores for n, load in enumerate(mix)}
            found[name] = {window: errors_pp(ticks, quotas, length) for window, length in WINDOWS_NS.items()}
            shares = {pod: shares[pod] for shares in [_shares(ticks)] for pod in quotas}
            counted = _counted(mix, done, span)
            if counted:
                off[name] = max(abs(shares[pod] - share) * 100 for pod, share in counted.items())
            said = "; ".join(
                f"{window} p50 {_at(errors, 50):.2f} p99 {_at(errors, 99):.2f} max {_at(errors, 100):.2f}"
                for window, errors in found[name].items()
            )
            script.say(f"{name}: pp off: {said}")
            script.say(f"    shares {listed(shares.values())}; by kernels finished {listed(counted.values())}")
            dry[name] = sum(progress.result["dry"] for progress in done)
            if dry[name]:
                longest_ms = max(progress.result["dry_longest_ms"] for progress in done)
                script.say(f"    floods found their queue empty {dry[name]} times, after up to {longest_ms:.1f} ms")
    script.plots.append(
        Plot(
            "how far shares are off, p99 over pods and windows",
            "",
            "percentage points",
            {
                window: [(name, _at(found[name][window], 99)) for name in MIXES if found[name][window]]
                for window in WINDOWS_NS
            },
            (LIMIT_PP,),
        )
    )
    note = "times, all mixes: the host was away for longer than the queue lasts, and the card had nothing of that pod"
    return [*_figures(found, off, dry), Figure("share_error_queue_empty", sum(dry.values()), note=note)]


def _run(script: Script, mix: Sequence[Load]) -> tuple[list[Tick], list[Progress], Span]:
    bench = script.bench
    pods = [bench.pod(f"p{n}", load.kernel, *load.options, cores=load.cores) for n, load in enumerate(mix)]
    bench.wait_busy(*pods)
    script.settle(2)
    start = time.time()
    ticks = watch(bench, 5 * script.scale)
    end = time.time()
    return ticks, stop_all(*pods), Span(start, end, {})


def _shares(ticks: Sequence[Tick]) -> dict[str, float]:
    return next(windows(ticks, ticks[-1].now_ns - ticks[0].now_ns))


def _counted(mix: Sequence[Load], done: Sequence[Progress], span: Span) -> dict[str, float]:
    """Return each pod's share by the kernels it finished; nothing if their lengths do not tell how long they ran."""
    if not all(load.counts for load in mix):
        return {}
    work = [
        progress.rate(span) * parse_duration(load.kernel) / NS_PER_US for load, progress in zip(mix, done, strict=True)
    ]
    return {f"p{n}": share / sum(work) for n, share in enumerate(work)}


def _at(errors: Sequence[float], percent: float) -> float:
    return percentile(errors, percent) if errors else math.nan


def _figures(
    found: Mapping[str, Mapping[str, Sequence[float]]], off: Mapping[str, float], dry: Mapping[str, int]
) -> list[Figure]:
    figures = []
    for window in WINDOWS_NS:
        # Plans with periods of more than 100 ms have fewer ticks than that, and no window of 100 ms.
        each = {name: _at(errors[window], 99) for name, errors in found.items() if errors[window]}
        limit: Asked = at_most(LIMIT_PP, " pp") if window == "1s" else NOTHING
        worst = max(each, key=lambda name: each[name])
        suffix = "" if window == "1s" else f"_{window}"
        note = f"worst mix: {worst}; all windows of {window} and pods of a mix; by GPU time"
        figures.append(median(f"share_error_pp_p99{suffix}", list(each.values()), *limit, note=note, pick=max))
        worst = max(each, key=lambda name: found[name][window][-1])
        note = f"worst of all windows of {window} and pods; mix: {worst}"
        most = [found[name][window][-1] for name in each]
        figures.append(median(f"share_error_pp_max{suffix}", most, note=note, pick=max))
        halves = [_at(errors[window], 50) for errors in found.values() if errors[window]]
        figures.append(median(f"share_error_pp_p50{suffix}", halves, note="worst mix", pick=max))
    for number, (name, errors) in enumerate(found.items(), 1):
        limit = at_most(LIMIT_PP, " pp")
        note = name + (f"; queues were empty {dry[name]} times" if dry[name] else "")
        figures.append(median(f"share_error_pp_p99_mix{number}", [_at(errors["1s"], 99)], *limit, note=note))
    if off:
        worst = max(off, key=lambda name: off[name])
        note = f"GPU time against kernels finished, whole run, worst pod; worst mix: {worst}"
        figures.append(median("share_time_against_kernels_pp", list(off.values()), note=note, pick=max))
    return figures


SECTIONS = {"share_error": measure}

if __name__ == "__main__":
    claim(SECTIONS, __doc__)
