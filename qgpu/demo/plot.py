"""The picture at the end: shares over time with their targets, and the online pod's latency below."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qgpu.demo.scenes import Scene
from qgpu.errors import NotSupportedError

_COLOURS = {"train": "#2463a8", "batch": "#d9822b", "chat": "#8a3ea8"}
#: The longest line of a caption.
_CAPTION_LETTERS = 18
_BANDS = {"best-effort": "#eef1f4", "burst-share": "#e9f3ea", "fixed-share": "#fbf1e0"}


@dataclass(frozen=True, slots=True)
class Point:
    """The shares of one interval, which ended ``at_s`` after the start, and the latency then."""

    at_s: float
    shares: Mapping[str, float]
    latency_us: float | None


@dataclass(frozen=True, slots=True)
class PlayedScene:
    """A scene and when it was played."""

    scene: Scene
    start_s: float
    end_s: float


def draw(path: Path, title: str, played: Sequence[PlayedScene], points: Sequence[Point]) -> None:
    """Draw the demo to ``path``, whose suffix is the format. Raises NotSupportedError without matplotlib."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise NotSupportedError(
            f"no picture without matplotlib; install it: pip --python {sys.executable} install matplotlib"
        ) from error

    figure, (shares, latency) = plt.subplots(
        2, 1, sharex=True, figsize=(13, 7), height_ratios=(3, 1), constrained_layout=True
    )
    _draw_scenes(shares, latency, played)
    _draw_shares(shares, played, points)
    _draw_latency(latency, points)
    shares.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=12)
    latency.set_xlabel("seconds")
    shares.set_xlim(played[0].start_s, played[-1].end_s)
    for axes in (shares, latency):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=3, colors="#444444")
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _draw_scenes(shares: Any, latency: Any, played: Sequence[PlayedScene]) -> None:
    for number, each in enumerate(played):
        for axes in (shares, latency):
            axes.axvspan(each.start_s, each.end_s, color=_BANDS[each.scene.policy], lw=0)
            if number:
                axes.axvline(each.start_s, color="white", lw=2)
        middle = (each.start_s + each.end_s) / 2
        shares.text(middle, 1.175, each.scene.policy, ha="center", va="top", fontsize=9, fontweight="bold")
        caption = textwrap.fill(each.scene.caption, _CAPTION_LETTERS, break_on_hyphens=False)
        shares.text(middle, 1.135, caption, ha="center", va="top", fontsize=8, color="#444444", linespacing=1.2)


def _draw_shares(axes: Any, played: Sequence[PlayedScene], points: Sequence[Point]) -> None:
    for name, colour in _COLOURS.items():
        for each in played:
            if (target := each.scene.targets.get(name)) is not None:
                axes.hlines(target, each.start_s, each.end_s, color=colour, lw=5, alpha=0.25)
        seen = [(point.at_s, point.shares[name]) for point in points if name in point.shares]
        if seen:
            axes.plot(*zip(*seen, strict=True), color=colour, lw=1.8, label=name, marker=".", ms=4)
    axes.plot([], [], color="#777777", lw=5, alpha=0.25, label="what the policy says")
    axes.set_ylim(0, 1.2)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0], ["0", "20 %", "40 %", "60 %", "80 %", "100 %"])
    axes.set_ylabel("share of the card (true GPU time)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 0.06), ncols=4, frameon=False, fontsize=9)


def _draw_latency(axes: Any, points: Sequence[Point]) -> None:
    seen = [(point.at_s, point.latency_us / 1000) for point in points if point.latency_us is not None]
    if seen:
        axes.plot(*zip(*seen, strict=True), color=_COLOURS["chat"], lw=1.8, marker=".", ms=4)
    axes.set_yscale("log")
    axes.set_ylim(0.05, 300)
    axes.set_yticks([0.1, 1, 10, 100], ["0.1 ms", "1 ms", "10 ms", "100 ms"])
    axes.minorticks_off()
    axes.set_ylabel("p99 latency of chat")
