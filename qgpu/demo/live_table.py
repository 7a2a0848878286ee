"""The live table: a few lines that are redrawn in place on a terminal, or one line a second elsewhere.

Pure formatting, except that it writes to the given stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

_BAR = 30
_PARTS = " ▏▎▍▌▋▊▉█"
_COLOURS = {"train": "34", "batch": "33", "chat": "35"}


@dataclass(frozen=True, slots=True)
class Row:
    """One pod in the table; ``share`` is its part of the card in the last interval, 0 to 1."""

    name: str
    pod_class: str
    cores: int | None
    share: float
    target: float | None
    latency_us: float | None


@dataclass(slots=True)
class LiveTable:
    """The table on one stream."""

    stream: TextIO
    fancy: bool
    _height: int = 0

    def scene(self, number: int, of: int, policy: str, caption: str) -> None:
        """Print the scene's title; earlier scenes stay above."""
        line = f"{number}/{of}  {policy}: {caption}"
        self._write([f"\033[1m{line}\033[0m" if self.fancy else line], stays=True)

    def show(self, at_s: float, rows: Sequence[Row]) -> None:
        """Draw the pods; on a terminal, replace the last drawing."""
        if self.fancy:
            header = f"     {'POD':8}{'CLASS':9}{'QUOTA':>6}{'SHOULD':>8}{'GETS':>8}  {'':{_BAR}}  P99 LATENCY"
            self._write([f"\033[2m{header}\033[0m", *(_line(row) for row in rows), f"{at_s:5.1f} s"], stays=False)
        else:
            told = "   ".join(f"{row.name} {row.share:6.1%}{_latency(row, ' p99 ')}" for row in rows)
            self._write([f"{at_s:6.1f} s   {told}"], stays=True)

    def _write(self, lines: Sequence[str], stays: bool) -> None:
        if self._height:
            self.stream.write(f"\033[{self._height}A\033[J")
        self.stream.write("\n".join(lines) + "\n")
        self.stream.flush()
        self._height = 0 if stays else len(lines)


def _line(row: Row) -> str:
    cores = "-" if row.cores is None else f"{row.cores} %"
    target = "-" if row.target is None else f"{row.target:.1%}"
    colour = _COLOURS.get(row.name, "0")
    left = f"     {row.name:8}{row.pod_class:9}{cores:>6}{target:>8}{row.share:>8.1%}"
    return f"{left}  \033[{colour}m{_bar(row.share)}\033[0m  {_latency(row)}"


def _bar(share: float) -> str:
    eighths = round(min(1.0, max(0.0, share)) * _BAR * 8)
    return ("█" * (eighths // 8) + (_PARTS[eighths % 8] if eighths % 8 else "")).ljust(_BAR)


def _latency(row: Row, before: str = "") -> str:
    if row.latency_us is None:
        return ""
    return before + (f"{row.latency_us:.0f} µs" if row.latency_us < 10_000 else f"{row.latency_us / 1000:.0f} ms")
