"""The shares of competing pods under every policy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from figures import Figure, at_least, at_most, median, within
from pods import Pod
from progress import Span, ratio
from progress import shares as shares_of
from script import Script, listed


def burst(script: Script) -> list[Figure]:
    """Measure two pods under Burst Share with quotas changed live, between two stretches of one alone."""
    figures: list[Figure] = []
    totals: list[float] = []
    for kernel, splits in {
        "50us": [(66, 33)],
        "1ms": [(66, 33), (70, 30), (90, 10)],
        "100ms": [(66, 33)],
    }.items():
        ratios, total = _pair(script, kernel, splits, 6 if kernel == "100ms" else 3)
        totals.append(statistics.median(total))
        names = {
            (66, 33): f"burst_ratio_2_1_{kernel}",
            (70, 30): "burst_ratio_70_30",
            (90, 10): "burst_ratio_90_10",
        }
        for split, (kernels, gpu_time) in ratios.items():
            note = f"{kernel} kernels; by GPU time {statistics.median(gpu_time):.3f}"
            figures.append(median(names[split], kernels, *within(split[0] / split[1]), note=note))
    note = "both over one alone, quotas 2:1, least of 50 µs, 1 ms, 100 ms: " + ", ".join(f"{t:.3f}" for t in totals)
    return [*figures, median("burst_total", totals, *at_least(0.96), note=note, pick=min)]


def gaps(script: Script) -> list[Figure]:
    """Measure pods that wait for each batch and leave tiny gaps, where timeslices alone would not bind."""
    gappy = ("--batch", "5", "--gap", "50us")
    with script.bench.daemon():
        script.bench.policy("burst-share")
        a = script.bench.pod("a", "1ms", *gappy, cores=66)
        script.running(a)
        alone = script.span(2.5)
        b = script.bench.pod("b", "1ms", *gappy, cores=33)
        script.running(b)
        script.settle(2)
        pair = [script.span(3) for _ in range(2)]
        done_b = b.stop()
        flood = script.bench.pod("c", "1ms", cores=33)
        script.running(flood)
        script.settle(2)
        beside = [script.span(3) for _ in range(2)]
        done_c, done_a = flood.stop(), a.stop()
    speed = done_a.rate(alone)
    ratios = [done_a.rate(span) / done_b.rate(span) for span in pair]
    totals = [(done_a.rate(span) + done_b.rate(span)) / speed for span in pair]
    flooded = [done_a.rate(span) / done_c.rate(span) for span in beside]
    script.say(f"gaps 66:33: {listed(ratios)}, total {listed(totals)}; beside a flood {listed(flooded)}")
    note = "each pod launches 5 ms of work, waits for it, pauses 50 µs"
    return [
        median("gaps_ratio_2_1", ratios, *within(2.0), note=note),
        median("gaps_total", totals, note="both over one alone"),
        median("gaps_beside_flood_2_1", flooded, *within(2.0), note="the other pod floods"),
    ]


def _pair(
    script: Script, kernel: str, splits: Sequence[tuple[int, int]], seconds: float
) -> tuple[dict[tuple[int, int], tuple[list[float], list[float]]], list[float]]:
    spans: dict[tuple[int, int], list[Span]] = {split: [] for split in splits}
    with script.bench.daemon():
        script.bench.policy("burst-share")
        a = script.bench.pod("a", kernel, cores=66)
        script.running(a)
        alone = [script.span(2.5)]
        b = script.bench.pod("b", kernel, cores=33)
        script.running(b)
        for _ in range(2):
            for split in splits:
                script.bench.cores(a=split[0], b=split[1])
                script.settle()
                spans[split].append(script.span(seconds))
        done_b = b.stop()
        script.settle()
        alone.append(script.span(2.5))
        done_a = a.stop()
    speed = statistics.mean(done_a.rate(span) for span in alone)
    ratios = {}
    for split, measured in spans.items():
        by_kernels = [done_a.rate(span) / done_b.rate(span) for span in measured]
        by_time = [ratio(span.used_ns["a"], span.used_ns["b"]) for span in measured]
        ratios[split] = (by_kernels, by_time)
        script.say(f"burst {kernel} {split[0]}:{split[1]}: {listed(by_kernels)}; GPU time {listed(by_time)}")
    total = [(done_a.rate(span) + done_b.rate(span)) / speed for span in spans[splits[0]]]
    script.say(f"burst {kernel} total: {listed(total)}")
    return ratios, total


def shares(script: Script) -> list[Figure]:
    """Measure three pods under Burst Share, 5:3:2."""
    asked = {"a": 50, "b": 30, "c": 20}
    with script.bench.daemon():
        script.bench.policy("burst-share")
        pods = [script.bench.pod(name, "1ms", cores=cores) for name, cores in asked.items()]
        script.running(*pods)
        spans = [script.span(3) for _ in range(2)]
        done = [pod.stop() for pod in pods]
    measured = [shares_of(done, span) for span in spans]
    errors = [
        max(abs(share * 100 / cores - 1) for share, cores in zip(found, asked.values(), strict=True))
        for found in measured
    ]
    script.say(f"shares 5:3:2: {[listed(found) for found in measured]}")
    middle = [statistics.median(column) for column in zip(*measured, strict=True)]
    holds = max(abs(share * 100 / cores - 1) for share, cores in zip(middle, asked.values(), strict=True)) <= 0.03
    return [
        Figure("burst_shares_5_3_2", middle, (), "0.5, 0.3, 0.2 ± 3%", holds, "1 ms kernels"),
        median("burst_shares_5_3_2_error", errors, *at_most(0.03), note="worst relative error", pick=max),
    ]


def fixed(script: Script) -> list[Figure]:
    """Measure one pod alone under Fixed Share 30 %, in turn with the same pod without a limit."""
    free: list[Span] = []
    held: list[Span] = []
    with script.bench.daemon():
        pod = script.bench.pod("a", "1ms", cores=30)
        script.bench.policy("burst-share")
        script.running(pod)
        for _ in range(2):
            script.bench.policy("burst-share")
            script.settle()
            free.append(script.span(2))
            script.bench.policy("fixed-share")
            script.settle(1.5)
            held.append(script.span(4))
        done = pod.stop()
    shares = [done.rate(fixed) / done.rate(alone) for fixed, alone in zip(held, free, strict=True)]
    script.say(f"fixed 30 %: {listed(shares)}")
    return [
        median("fixed_30_alone", shares, "0.30 ± 0.01", lambda v: abs(v - 0.3) <= 0.01, "1 ms kernels, 100 ms period")
    ]


def best_effort(script: Script) -> list[Figure]:
    """Measure two, four and eight pods without quotas; with eight, also the daemon's CPU time."""
    spans: dict[int, list[Span]] = {}
    with script.bench.daemon():
        script.bench.policy("best-effort")
        pods: list[Pod] = []
        for count in (2, 4, 8):
            pods += (fresh := [script.bench.pod(f"p{n}", "1ms") for n in range(len(pods), count)])
            script.running(*fresh)
            cpu_s, began = script.bench.cpu_s(), time.monotonic()
            spans[count] = [script.span(2.5) for _ in range(2)]
            cpu_percent = (script.bench.cpu_s() - cpu_s) / (time.monotonic() - began) * 100
        done = [pod.stop() for pod in pods]
    figures = []
    for count, measured in spans.items():
        rates = [[progress.rate(span) for progress in done[:count]] for span in measured]
        spread = [(max(rate) - min(rate)) / statistics.mean(rate) for rate in rates]
        script.say(f"best effort, {count} pods: spread {listed(spread)}, total {listed([sum(r) for r in rates])}/s")
        note = "1 ms kernels, (most - least) / mean"
        figures.append(median(f"best_effort_spread_{count}", spread, *at_most(0.02), note=note))
    script.say(f"daemon and helpers with 8 pods: {cpu_percent:.2f} % of a core")
    required, holds = at_most(5, " %")
    note = "daemon, guardian and what else of qgpu runs, 8 busy pods"
    if script.bench.simulated:
        # Here the daemon also simulates the card, and every load asks it for progress.
        return [*figures, Figure("daemon_cpu_percent", cpu_percent, note=f"{note}; with the card it simulates")]
    return [*figures, Figure("daemon_cpu_percent", cpu_percent, (), required, holds(cpu_percent), note)]
