"""Two kinds of SVG charts, without a library: values over time, and strips of on and off. It knows nothing about GPUs.

Colours are CSS variables, so the page around a chart chooses between light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 230, 52, 12, 10, 24
#: A row of strips: the name above, the strip below.
_ROW, _NAME = 34, 14


@dataclass(frozen=True, slots=True)
class Line:
    """Values over seconds, and the level that was asked for."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    asked: float | None = None


@dataclass(frozen=True, slots=True)
class Strip:
    """When something was on, and when it was barred from being on, in seconds."""

    name: str
    colour: str
    spans: Sequence[tuple[float, float]]
    barred: Sequence[tuple[float, float]] = ()


#: The page's colours for light and dark, for a chart that stands alone.
STYLE = """
:root { --paper:#fff; --ink:#1d2430; --soft:#667085; --line:#e3e7ee; --c0:#2f6fb7; --c1:#e08a2e; --c2:#2f9e77;
  --c3:#b6509b; --c4:#7a6fd0; --c5:#c4483f; --c6:#4aa3c7; --c7:#8b7a3d; }
@media (prefers-color-scheme: dark) { :root { --paper:#151a22; --ink:#e7ebf2; --soft:#95a0b3; --line:#2a3342;
  --c0:#5b9be0; --c1:#f0a65a; --c2:#56c49b; --c3:#d77fc0; --c4:#a59bf0; --c5:#ea7a70; --c6:#74c3e3; --c7:#bfae6a; } }
svg text { font: 11px system-ui, "DejaVu Sans", sans-serif; fill: var(--soft); }
.grid { stroke: var(--line); fill: none; } .line { fill: none; stroke-width: 1.6; }
.asked { stroke-dasharray: 2 4; fill: none; opacity: .8; } .hatch { stroke: var(--line); stroke-width: 3; }
"""


def over_time(lines: Sequence[Line], seconds: float) -> str:
    """Return a chart of values between 0 and 1 over time; dotted lines show what was asked for."""
    inner = _HEIGHT - _TOP - _BOTTOM

    def y(value: float) -> float:
        return _TOP + inner * (1 - min(1.0, value))

    body = [_axis(seconds, _HEIGHT)]
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        body.append(f'<path class="grid" d="M{_LEFT} {y(part):.1f}H{_WIDTH - _RIGHT}"/>')
        body.append(f'<text x="{_LEFT - 6}" y="{y(part) + 4:.1f}" text-anchor="end">{part:.0%}</text>')
    for line in lines:
        if line.asked is not None:
            level = f"M{_LEFT} {y(line.asked):.1f}H{_WIDTH - _RIGHT}"
            body.append(f'<path class="asked" stroke="{line.colour}" d="{level}"/>')
        path = "L".join(f"{_x(at, seconds):.1f} {y(value):.1f}" for at, value in line.points)
        title = f"<title>{escape(line.name)}</title>"
        body.append(f'<path class="line" stroke="{line.colour}" d="M{path}">{title}</path>')
    return _svg(body, _HEIGHT)


def strips(rows: Sequence[Strip], seconds: float) -> str:
    """Return a chart with one strip a row below its name: filled while on, hatched while barred."""
    height = _TOP + _ROW * len(rows) + _BOTTOM
    body = [_axis(seconds, height)]
    for number, row in enumerate(rows):
        top = _TOP + number * _ROW
        strip, height_of = top + _NAME, _ROW - _NAME
        body.append(f'<text x="{_LEFT}" y="{strip - 3}">{escape(row.name)}</text>')
        body.append(f'<g fill="url(#barred)">{_boxes(row.barred, seconds, strip + 1, height_of - 3)}</g>')
        body.append(f'<g fill="{row.colour}">{_boxes(row.spans, seconds, strip + 3, height_of - 7)}</g>')
    return _svg(body, height)


def _boxes(spans: Sequence[tuple[float, float]], seconds: float, top: int, height: int) -> str:
    parts = []
    for start, end in spans:
        if end > 0 and start < seconds:
            left, right = _x(max(0.0, start), seconds), _x(min(seconds, end), seconds)
            parts.append(f'<rect x="{left:.2f}" y="{top}" width="{max(0.15, right - left):.2f}" height="{height}"/>')
    return "".join(parts)


def _x(at: float, seconds: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * at / seconds


def _axis(seconds: float, height: int) -> str:
    ticks = []
    for part in range(6):
        at = seconds * part / 5
        anchor = "start" if part == 0 else "end" if part == 5 else "middle"
        ticks.append(f'<text x="{_x(at, seconds):.1f}" y="{height - 6}" text-anchor="{anchor}">{at:.2g} s</text>')
    return "".join(ticks)


def _svg(body: Sequence[str], height: int) -> str:
    hatch = (
        '<defs><pattern id="barred" width="5" height="5" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path class="hatch" d="M0 0V5"/></pattern></defs>'
    )
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{hatch}{"".join(body)}</svg>'
