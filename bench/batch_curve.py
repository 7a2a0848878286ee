"""(a) Two pods infer with the same batch size and 2:1 asked: what they get at each size, and what rivals give them.

    python bench/batch_curve.py [--only batch_curve_builtin]
    python bench/batch_curve.py --only batch_burst       # Burst Share without its rivals, in under two minutes

The pods wait for each batch and so leave gaps between batches, which timeslices alone do not hold. Rows: qgpu's Burst
Share (its default) and Fixed Share at quotas 66:33; without qgpu: plain sharing and, if installed, MPS with 66 and 33 %
of the threads. The program is ResNet-50 where torch is installed, and on every machine qgpu-load's kernel in the same
shape.

ResNet-50 runs in two ways. With a CUDA graph for each batch, as inference servers do, a pod alone fills the card at
every size: the curve is the card's. Launched kernel by kernel from Python, 160 for a batch, a small batch takes as long
as the host's CPU takes to launch it. How much of the card a pod alone fills (``batch_fill``: its speed over that with
graphs) is then a figure of the host. The ratio is required only where the pair gets 0.97 of what one pod alone gets,
and where a pod alone fills the card (0.95). Otherwise the pair may get more than one pod alone, and neither pod is held
back.

The ratio by images and the ratio by GPU time (``batch_gpu_ratio``) differ by what a second of GPU time is worth to each
pod. So kernel by kernel each size is measured in both roles, with quotas exchanged, and the ratio is the geometric
mean, which cancels a faster CPU of one process. The launch time of a batch is reported for each span: if it differs
from span to span, so do the images.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batch_pair import QUOTAS, Measured, Pair, pair
from figures import NOTHING, Asked, Figure, at_least, between, median
from inference import IMAGE_US
from plots import Plot
from pods import BenchError, Pod
from rivals import mps, mps_present
from script import NotHereError, Script, claim, listed, spread

SIZES = (16, 32, 64, 128, 256)
RATIO = (1.96, 2.04)
TOTAL = 0.97
FULL = 0.95
BURST, FIXED, PLAIN, MPS = "burst-share", "fixed-share", "plain", "MPS 66/33"
_TAGS = {BURST: "", FIXED: "_fixed", PLAIN: "_plain", MPS: "_mps"}
#: A pod that has rested this long is new to the ledger, so nothing learned at one size affects the next.
_FORGOTTEN_S = 2.1


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to infer, and the prefix of its figures."""

    tag: str
    name: str
    graph: bool = False


GRAPH = Kind("_graph", "ResNet-50 fp16, CUDA graphs", True)
EAGER = Kind("", "ResNet-50 fp16, kernel by kernel")
BUILTIN = Kind("_builtin", f"images of {IMAGE_US} µs")

Rows = Mapping[Kind, dict[str, Measured]]


def resnet50(script: Script) -> list[Figure]:
    """Draw the curves of a real network."""
    if script.bench.simulated or not _torch():
        raise NotHereError("it needs a GPU and torch")
    return _measured(script, "resnet50", SIZES, GRAPH, EAGER)


def builtin(script: Script) -> list[Figure]:
    """Draw the curve of qgpu-load's kernel in batches; fewer sizes if a real network is measured too, to save time."""
    few = not script.bench.simulated and _torch()
    return _measured(script, "kernels", SIZES[::2] if few else SIZES, BUILTIN)


def burst(script: Script) -> list[Figure]:
    """Measure a real network under Burst Share only, against one pod alone."""
    if script.bench.simulated or not _torch():
        raise NotHereError("it needs a GPU and torch")
    bench = script.bench
    found: Rows = {GRAPH: {}, EAGER: {}}
    with bench.daemon():
        bench.policy(BURST)
        with pair(script, "resnet50", SIZES, lambda name, of: bench.start_pod(name, of, cores=QUOTAS[name])) as both:
            for kind, sizes in ((GRAPH, SIZES), (EAGER, SIZES[:3])):
                found[kind][BURST] = _by_burst(both, kind, alone=True, sizes=sizes)
            both.end()
    return _told(script, found, "burst")


SECTIONS = {"batch_curve": resnet50, "batch_curve_builtin": builtin, "batch_burst": burst}


def _torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _measured(script: Script, engine: str, sizes: Sequence[int], *kinds: Kind) -> list[Figure]:
    return _told(script, _curves(script, engine, sizes, kinds), "batch")


def _told(script: Script, found: Rows, name: str) -> list[Figure]:
    """Print and plot the results, and return figures named after ``name``."""
    figures = []
    for kind, rows in found.items():
        alone = {size: _alone(rows, size) for size in next(iter(rows.values())).pairs}
        fill = {size: alone[size] / _alone(found[GRAPH], size) for size in alone} if kind is EAGER else {}
        _say(script, kind, rows, alone)
        script.plots += _plots(kind, rows, alone)
        figures += _figures(name, kind, rows, alone, fill)
    return figures


def _by_burst(both: Pair, kind: Kind, *, alone: bool, sizes: Sequence[int] | None = None) -> Measured:
    """Measure Burst Share: three times, or twice in both roles if pods wait for their CPUs."""
    both_roles = kind is EAGER
    return both.row(
        graph=kind.graph,
        sizes=sizes,
        alone=alone,
        rest_s=_FORGOTTEN_S,
        settle_s=1.5,
        spans=2 if both_roles else 3,
        both_roles=both_roles,
    )


def _curves(script: Script, engine: str, sizes: Sequence[int], kinds: Sequence[Kind]) -> Rows:
    bench = script.bench
    found: Rows = {kind: {} for kind in kinds}
    with bench.daemon():
        bench.policy(BURST)
        with pair(script, engine, sizes, lambda name, of: bench.start_pod(name, of, cores=QUOTAS[name])) as both:
            for kind, rows in found.items():
                rows[BURST] = _by_burst(both, kind, alone=bench.simulated)
            bench.policy(FIXED)
            found[kinds[0]][FIXED] = both.row(graph=kinds[0].graph, rest_s=0.2, settle_s=0.6, spans=2)
            both.end()
    if not bench.simulated:
        with pair(script, engine, sizes, bench.start_outside) as both:
            for kind, rows in found.items():
                rows[PLAIN] = both.row(graph=kind.graph, alone=True, settle_s=0.4, spans=1, brief=True)
            both.end()
        if mps_present():
            try:
                _by_mps(script, engine, sizes, found)
            except (BenchError, SystemExit) as error:  # on SIGTERM too: keep the other results
                script.say(f"{MPS} is left out: {error}")
                for rows in found.values():
                    rows.pop(MPS, None)
    return found


def _by_mps(script: Script, engine: str, sizes: Sequence[int], found: Rows) -> None:
    bench = script.bench
    with mps(bench) as service:

        def start(name: str, command: Sequence[str]) -> Pod:
            return bench.start_outside(name, command, service.client(QUOTAS[name]))

        with pair(script, engine, sizes, start) as both:
            for kind, rows in found.items():
                rows[MPS] = both.row(graph=kind.graph, settle_s=0.4, spans=1, brief=True)
            both.end()


def _alone(rows: Mapping[str, Measured], size: int) -> float:
    """Return the images per second of a pod alone, without qgpu where that is possible."""
    row = next(row for row in rows.values() if row.alone)
    return row.done[0].rate(row.alone[size])


def _totals(row: Measured, size: int, alone: Mapping[int, float]) -> list[float]:
    return [rate / alone[size] for rate in row.rates(size)]


def _say(script: Script, kind: Kind, rows: Mapping[str, Measured], alone: Mapping[int, float]) -> None:
    for size in alone:
        script.say(f"{kind.name}, batch {size}: alone {alone[size]:.0f} images/s")
        for name, row in rows.items():
            gpu = row.by_gpu_time(size)
            script.say(
                f"    {name:12} ratio {listed(row.ratios(size))}; total {listed(_totals(row, size, alone))}"
                + (f"; by GPU time {listed(gpu)}" if gpu else "")
            )
            if kind is EAGER:
                for pod, images, launching in zip(QUOTAS, row.images(size), row.launching_ms(size), strict=True):
                    script.say(f"        {pod}: images/s {listed(images)}; launching a batch {listed(launching)} ms")
                if size in row.alone:
                    script.say(f"        alone: launching a batch {row.launching_alone_ms(size):.2f} ms")


def _plots(kind: Kind, rows: Mapping[str, Measured], alone: Mapping[int, float]) -> list[Plot]:
    ratios = {name: [spread(size, row.ratios(size)) for size in row.pairs] for name, row in rows.items()}
    totals = {name: [spread(size, _totals(row, size, alone)) for size in row.pairs] for name, row in rows.items()}
    what = f"two pods, {kind.name}, 2:1 asked"
    return [
        Plot(what, "batch size", "first pod over second", ratios, RATIO, log_x=True),
        Plot(what, "batch size", "both over one alone", totals, (TOTAL,), log_x=True),
    ]


def _figures(
    of: str, kind: Kind, rows: Mapping[str, Measured], alone: Mapping[int, float], fill: Mapping[int, float]
) -> list[Figure]:
    """Return the figures of one kind; ``fill``: how much of the card one pod alone fills, if not all."""
    figures = []
    for name, row in rows.items():
        tag = kind.tag + _TAGS[name]
        totals = {size: statistics.median(_totals(row, size, alone)) for size in row.pairs}
        for size, total in totals.items():
            note = f"{kind.name}, {name}; total {total:.3f} of {alone[size]:.0f} images/s alone"
            if size in fill:
                note += f", which fill {fill[size]:.2f} of the card"
            judged = name in (BURST, FIXED) and total >= TOTAL and fill.get(size, 1) >= FULL
            asked: Asked = between(*RATIO) if judged else NOTHING
            if size in row.exchanged:
                note += "; both roles"
            if kind is EAGER:
                launching = [ms for pod in row.launching_ms(size) for ms in pod]
                note += f"; the host took {min(launching):.2f} to {max(launching):.2f} ms to launch a batch"
            figures.append(median(f"{of}_ratio{tag}_{size}", row.ratios(size), *asked, note=note))
            if gpu := row.by_gpu_time(size):
                figures.append(median(f"{of}_gpu_ratio{tag}_{size}", gpu, note="the same by GPU time"))
        note = f"{kind.name}, {name}; least of " + ", ".join(f"{total:.3f}" for total in totals.values())
        limit: Asked = at_least(TOTAL) if name == BURST else NOTHING
        figures.append(median(f"{of}_total{tag}", list(totals.values()), *limit, note=note, pick=min))
    note = "a pod alone, kernel by kernel, over the same with CUDA graphs: what of the card it fills"
    by_itself = next(row for row in rows.values() if row.alone)
    return figures + [
        Figure(f"{of}_fill_{size}", part, note=f"{note}; launching took {by_itself.launching_alone_ms(size):.2f} ms")
        for size, part in fill.items()
    ]


if __name__ == "__main__":
    claim(SECTIONS, __doc__)
