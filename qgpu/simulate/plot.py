"""Plots of simulated scenarios. The only file of the simulator that needs matplotlib."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

from qgpu.errors import ConfigError, NotSupportedError
from qgpu.simulate.report import Moment, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Spans to take means over, in s, from none. Turns by gate make shares jump between 0 and 1 in shorter ones.
_SPANS_S = (0.0, 0.5, 1.0, 2.0, 4.0)
#: At most this part of the scenario is one span.
_LONGEST = 0.25
#: A line is readable if it moves by less than this from one span to the next, on average.
_WIGGLE = 0.05


def readable_span_s(moments: Sequence[Moment], duration_s: float) -> float:
    """Return the shortest span, in s, of which means make readable lines; 0: the moments themselves do.

    If none does, it is the longest that leaves anything to see.
    """
    spans_s = [span_s for span_s in _SPANS_S if span_s <= _LONGEST * duration_s]
    pods = {pod for moment in moments for pod in moment.shares}
    for span_s in spans_s:
        picked = _every(span_s, moments)
        lines = [[means(moments, pod, span_s)[index] for index in picked] for pod in pods]
        if all(_wiggle(line) < _WIGGLE for line in lines):
            return span_s
    return spans_s[-1]


def means(moments: Sequence[Moment], pod: str, span_s: float) -> list[float]:
    """Return a pod's share at every moment, as a mean over ``span_s`` around it; over itself alone for 0."""
    if not span_s:
        return [moment.shares.get(pod, 0.0) for moment in moments]
    ends_s = [moment.at_s for moment in moments]
    sums_s = [0.0]  # its GPU time up to each moment
    for before_s, moment in zip([0.0, *ends_s], moments, strict=False):
        sums_s.append(sums_s[-1] + moment.shares.get(pod, 0.0) * (moment.at_s - before_s))
    found, first, last = [], 0, 0
    for end_s in ends_s:
        while first < len(ends_s) - 1 and ends_s[first] <= end_s - span_s / 2:
            first += 1
        while last < len(ends_s) - 1 and ends_s[last] < end_s + span_s / 2:
            last += 1
        since_s = ends_s[first - 1] if first else 0.0
        found.append((sums_s[last + 1] - sums_s[first]) / max(1e-9, ends_s[last] - since_s))
    return found


def _every(span_s: float, moments: Sequence[Moment]) -> list[int]:
    """Return the indices of moments that are about ``span_s`` apart."""
    found: list[int] = []
    for index, moment in enumerate(moments):
        if not found or moment.at_s >= moments[found[-1]].at_s + span_s:
            found.append(index)
    return found


def _wiggle(shares: Sequence[float]) -> float:
    return sum(abs(after - before) for before, after in pairwise(shares)) / max(1, len(shares) - 1)


def check(file: Path) -> None:
    """Check that a plot can be drawn to this file. Raises NotSupportedError, ConfigError."""
    kinds = _figure().canvas.get_supported_filetypes()
    if file.suffix and file.suffix.removeprefix(".").lower() not in kinds:
        raise ConfigError(f"{file}: no format of plots; end its name in one of {', '.join(kinds)}")


def draw(report: Report, file: Path) -> None:
    """Draw each pod's share and quota over time. The file's suffix is the format.

    Raises NotSupportedError without matplotlib, ConfigError if the file cannot be written.
    """
    figure = _figure()
    axes = figure.subplots()
    times = [moment.at_s for moment in report.moments]
    span_s = readable_span_s(report.moments, report.duration_s)
    for pod in report.pods:
        shares = means(report.moments, pod.name, span_s)
        (line,) = axes.step(times, shares, where="pre", label=f"{pod.name} ({pod.pod_class})", linewidth=1.2)
        quotas = [moment.quotas.get(pod.name, nan) for moment in report.moments]
        axes.step(times, quotas, where="pre", color=line.get_color(), linestyle=":", linewidth=1.0)
    axes.set(xlim=(0, report.duration_s), ylim=(0, 1.02), xlabel="simulated time, s", ylabel="share of the pGPU")
    axes.set_title(f"{report.scenario}: GPU time over time{f', means of {span_s:g} s' * bool(span_s)}; dotted: quota")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error


def _figure() -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotSupportedError(
            f"plots need matplotlib; install it: pip --python {sys.executable} install matplotlib"
        ) from error
    return Figure(figsize=(9, 4), layout="constrained")
