"""A recording as one self-contained HTML page: shares and quotas, turns, gates, suspended pods, refusals."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from qgpu.model import NS_PER_MS, NS_PER_S, Span
from qgpu.model.suspension import Residency
from qgpu.trace.chart import STYLE, Line, Strip, over_time, strips
from qgpu.trace.group_candidates import of_track
from qgpu.trace.recording import GpuTrack, PodTrack, Recording, shares
from qgpu.trace.wakeups import wakeups

#: The most and fewest points of a line; between those, each point is a share over this time, a few turns of each pod.
_MOST_POINTS, _LEAST_POINTS = 300, 10
_SHARE_NS = 500 * NS_PER_MS
#: How much of the recording the page shows switch by switch.
_CLOSE_S = 0.5
_COLOURS = 8
_ON_THE_WAY = tuple(state for state in Residency if state.moving)
_HEADER = (
    ("pod", ""),
    ("class", ""),
    ("quota", "the share that its grant guarantees"),
    ("share", "true GPU time over the time recorded"),
    ("turns", "times it was on the engine, and how long on average"),
    ("off engine p50 / p99 / longest", "between two turns, its own pauses included"),
    ("gate closed", "of the time recorded"),
    ("suspended", "of the time recorded, with the way off the card and back"),
    ("wake-ups", "turns of an online pod that began where another pod ran"),
    ("refused", "allocations over its limit; driver calls that would change its share"),
)

_STYLE = """
body { max-width: 64rem; margin: 2rem auto; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.4rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
h3 { font-size: .95rem; margin: 1.4rem 0 .2rem; } p, th { color: var(--soft); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
th { text-align: left; font-weight: 500; } th, td { padding: .3rem .5rem; border-bottom: 1px solid var(--line); }
i { display: inline-block; width: .7rem; height: .7rem; border-radius: .2rem; margin-right: .5rem; }
svg { width: 100%; height: auto; } .wide { overflow-x: auto; } h1, td:first-child { overflow-wrap: anywhere; }
@media (max-width: 54rem) {
  .wide svg { min-width: 40rem; }
  thead { display: none; } tr { display: block; padding: .6rem 0; border-bottom: 1px solid var(--line); }
  td { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .1rem 0; text-align: right; }
  td::before { content: attr(data-name); color: var(--soft); text-align: left; }
  td:first-child { display: block; text-align: left; font-weight: 600; } td:first-child::before { content: none; }
}
"""


@dataclass(frozen=True, slots=True)
class About:
    """Where and when the recording was made."""

    plane: str
    driver: str | None
    version: str
    node: str
    #: By pod: allocations and calls refused during the recording; None if the plane does not count them.
    refused: Mapping[str, tuple[int | None, int | None]]


def write(recording: Recording, about: About) -> str:
    """Return the page."""
    seconds = recording.span_ns / NS_PER_S
    when = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    lost = recording.lost + recording.dropped + recording.gaps
    missing = f" {lost} switches or samples are missing." if lost else ""
    parts = [_gpu(gpu, about) for gpu in recording.gpus.values()]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>qgpu: {escape(about.node)}</title><style>{STYLE}{_STYLE}</style>"
        f"<h1>{escape(about.node)}: {seconds:.1f} s of sharing</h1>"
        f"<p>Until {escape(when)}; qgpu {escape(about.version)}, plane {escape(about.plane)}, "
        f"driver {escape(about.driver or 'none')}. From the hardware's context switches; "
        f"the ledger differs by {recording.error:.4%} at most.{missing}</p>{''.join(parts)}</html>\n"
    )


def _gpu(gpu: GpuTrack, about: About) -> str:
    pods = gpu.online_first
    seconds = max(gpu.span_ns, 1) / NS_PER_S
    colours = {pod.pod: f"var(--c{number % _COLOURS})" for number, pod in enumerate(pods)}
    used = sum(pod.traced_ns for pod in pods) / max(1, gpu.span_ns)
    turns = sum(len(pod.runs) for pod in pods)
    plans = sum(gpu.first_ns < at_ns <= gpu.last_ns for at_ns, _ in gpu.plans)
    head = (
        f"<h2>pGPU {gpu.index}: {escape(gpu.name)}</h2>"
        f"<p>{escape(gpu.policy)}, period {gpu.period_ns / NS_PER_MS:g} ms. "
        f"{used:.1%} of its time in use, {turns / seconds:.0f} turns a second, plan changed {plans} times.</p>"
    )
    if not pods:
        return head + "<p>No pods.</p>"
    step_ns = max(gpu.span_ns // _MOST_POINTS, min(_SHARE_NS, gpu.span_ns // _LEAST_POINTS), 1)
    lines = [
        Line(
            pod.pod,
            colours[pod.pod],
            [((at_ns - gpu.first_ns) / NS_PER_S, share) for at_ns, share in _shares(gpu, pod, step_ns)],
            None if pod.cores is None else pod.cores / 100,
        )
        for pod in pods
    ]
    gain = of_track(gpu)
    advice = f"<p>Share group: {escape(str(gain))}.</p>" if gain else ""
    close_s = min(_CLOSE_S, seconds)
    rows = [
        Strip(pod.pod, colours[pod.pod], _seconds(gpu, pod.runs, close_s), _seconds(gpu, pod.closed, close_s))
        for pod in pods
    ]
    return (
        head
        + _table(gpu, pods, colours, about)
        + advice
        + f"<h3>Shares, each over {step_ns / NS_PER_S:.2g} s; dotted: quota</h3>{_wide(over_time(lines, seconds))}"
        + f"<h3>Who was on the engine in the first {close_s:g} s; hatched: gate closed</h3>"
        + _wide(strips(rows, close_s))
        + _suspensions(gpu, pods, colours)
    )


def _suspensions(gpu: GpuTrack, pods: Sequence[PodTrack], colours: Mapping[str, str]) -> str:
    """Show when pods were off the card; nothing if none was."""
    seconds = max(gpu.span_ns, 1) / NS_PER_S
    rows = [
        Strip(
            pod.pod,
            colours[pod.pod],
            _seconds(gpu, pod.spans(Residency.SUSPENDED), seconds),
            _seconds(gpu, pod.spans(*_ON_THE_WAY), seconds),
        )
        for pod in pods
        if pod.suspended
    ]
    return f"<h3>Who was suspended; hatched: on the way</h3>{_wide(strips(rows, seconds))}" if rows else ""


def _wide(chart: str) -> str:
    """Return a chart that a narrow screen scrolls sideways, instead of the page."""
    return f'<div class="wide" tabindex="0">{chart}</div>'


def _shares(gpu: GpuTrack, pod: PodTrack, step_ns: int) -> list[tuple[int, float]]:
    """Return shares over whole steps. A shorter step at the end would show only a moment, so it is left out."""
    whole_ns = gpu.first_ns + max(1, gpu.span_ns // step_ns) * step_ns
    return list(shares(pod.runs, gpu.first_ns, min(whole_ns, gpu.last_ns), step_ns))


def _seconds(gpu: GpuTrack, spans: Sequence[Span], until_s: float) -> list[tuple[float, float]]:
    until_ns = gpu.first_ns + until_s * NS_PER_S
    return [
        ((start_ns - gpu.first_ns) / NS_PER_S, (end_ns - gpu.first_ns) / NS_PER_S)
        for start_ns, end_ns in spans
        if start_ns < until_ns
    ]


def _table(gpu: GpuTrack, pods: Sequence[PodTrack], colours: Mapping[str, str], about: About) -> str:
    head = "".join(f'<th title="{escape(what)}">{escape(name)}</th>' for name, what in _HEADER)
    names = [name for name, _ in _HEADER[1:]]
    rows = "".join(
        f'<tr><td><i style="background:{colours[pod.pod]}"></i>{escape(pod.pod)}</td>'
        + "".join(
            f'<td data-name="{escape(name)}">{escape(cell)}</td>'
            for name, cell in zip(names, _cells(gpu, pod, about), strict=True)
        )
        + "</tr>"
        for pod in pods
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cells(gpu: GpuTrack, pod: PodTrack, about: About) -> tuple[str, ...]:
    away = sorted(after[0] - before[1] for before, after in pairwise(pod.runs))
    mean_ns = pod.traced_ns / len(pod.runs) if pod.runs else 0.0
    closed_ns = sum(end_ns - start_ns for start_ns, end_ns in pod.closed)
    off_ns = sum(end_ns - start_ns for start_ns, end_ns in pod.spans(Residency.SUSPENDED, *_ON_THE_WAY))
    refused = about.refused.get(pod.pod, (None, None))
    return (
        pod.pod_class,
        "-" if pod.cores is None else f"{pod.cores} %",
        f"{pod.traced_ns / max(1, gpu.span_ns):.2%}",
        f"{len(pod.runs)} of {mean_ns / NS_PER_MS:.2f} ms",
        " / ".join(f"{_at(away, part) / NS_PER_MS:.2f}" for part in (0.5, 0.99, 1.0)) + " ms" if away else "-",
        f"{closed_ns / max(1, gpu.span_ns):.1%}" if pod.closed else "-",
        f"{off_ns / max(1, gpu.span_ns):.1%}" if pod.suspended else "-",
        str(sum(1 for _ in wakeups(gpu, pod))) if pod.pod_class == "online" else "-",
        ", ".join("not counted" if n is None else str(n) for n in refused) if any(refused) else "-",
    )


def _at(values: Sequence[int], part: float) -> int:
    return values[min(len(values) - 1, int(part * len(values)))]


def refusals(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the refusals between two lists of pods."""
    then = {pod["name"]: pod for pod in before}
    keys = ("refused_memory", "refused_calls")
    return {
        pod["name"]: tuple(
            None if pod[key] is None else pod[key] - (then.get(pod["name"], {}).get(key) or 0) for key in keys
        )
        for pod in after
    }
