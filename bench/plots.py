"""Pictures of results: the plot data that results files carry, and its drawing."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over one axis; a point is x, y and, with repeats, the least and most y.

    If x is text, the lines are drawn as groups of bars.
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[Sequence[Any]]]
    #: The requirement: a horizontal line, or a band between two.
    asked: Sequence[float] = ()
    log_x: bool = False
    log_y: bool = False
    note: str = ""
    #: Events: x and a label.
    marks: Sequence[Sequence[Any]] = field(default_factory=tuple)


def svg(plots: Sequence[Plot], columns: int = 2) -> str:
    """Draw plots side by side as one SVG picture. Raises ImportError without matplotlib."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "qgpu"  # the same figures make the same file
    columns = min(columns, len(plots))
    rows = -(-len(plots) // columns)
    figure = Figure(figsize=(6.2 * columns, 3.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for cell in axes.flat[len(plots) :]:
        cell.set_axis_off()
    for cell, plot in zip(axes.flat, plots, strict=False):
        _draw(cell, plot)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _draw(axes: Any, plot: Plot) -> None:
    if len(plot.asked) == 2:
        axes.axhspan(*plot.asked, color="0.85", zorder=0, label="asked")
    elif plot.asked:
        axes.axhline(plot.asked[0], color="0.5", linestyle=":", label="asked")
    if any(isinstance(point[0], str) for line in plot.lines.values() for point in line):
        _draw_bars(axes, plot)
    else:
        for name, line in plot.lines.items():
            many = len(line) > 40
            axes.errorbar(
                [point[0] for point in line],
                [point[1] for point in line],
                yerr=_spread(line),
                label=name,
                marker=None if many else "o",
                markersize=4,
                linewidth=1.0 if many else 1.4,
                capsize=2,
            )
    for at, what in plot.marks:
        axes.axvline(at, color="0.6", linewidth=0.8)
        axes.annotate(what, (at, 1), xycoords=("data", "axes fraction"), fontsize=7, rotation=90, va="top")
    if plot.log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({point[0] for line in plot.lines.values() for point in line})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    if plot.log_y:
        axes.set_yscale("log")
    axes.set_title(plot.title, fontsize=10)
    axes.set(xlabel=plot.x, ylabel=plot.y)
    axes.legend(fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bars(axes: Any, plot: Plot) -> None:
    groups = list(dict.fromkeys(str(point[0]) for line in plot.lines.values() for point in line))
    width = 0.8 / len(plot.lines)
    for index, (name, line) in enumerate(plot.lines.items()):
        at = [groups.index(str(point[0])) + (index - (len(plot.lines) - 1) / 2) * width for point in line]
        axes.bar(at, [point[1] for point in line], width, yerr=_spread(line), capsize=2, label=name)
    axes.set_xticks(range(len(groups)), groups, fontsize=7, rotation=20 if len(groups) > 5 else 0)


def _spread(line: Sequence[Sequence[Any]]) -> list[list[float]] | None:
    """Return how far least and most are below and above, as matplotlib wants it."""
    if not all(len(point) == 4 for point in line):
        return None
    return [[max(0.0, y - low) for _, y, low, _ in line], [max(0.0, high - y) for _, y, _, high in line]]
