"""Figures: what was measured, how far it spread, what was asked of it; and the files they go to."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure, with the repeats that it is the median of (or ``pick`` of)."""

    name: str
    value: Any
    repeats: Sequence[float] = ()
    required: str = ""
    passed: bool | None = None
    note: str = ""

    def row(self) -> str:
        """Return its row of the table."""
        spread = ""
        if len(self.repeats) > 1:
            low, middle, high = min(self.repeats), statistics.median(self.repeats), max(self.repeats)
            spread = f"{low:.4g} / {middle:.4g} / {high:.4g} (n={len(self.repeats)})"
        passed = {None: "", True: "yes", False: "**no**"}[self.passed]
        value = ", ".join(map(_short, self.value)) if isinstance(self.value, list) else _short(self.value)
        return f"| `{self.name}` | {self.required} | {value} | {spread} | {passed} | {self.note} |"


def median(
    name: str,
    repeats: Sequence[float],
    required: str = "",
    holds: Callable[[float], bool] | None = None,
    note: str = "",
    pick: Callable[[Sequence[float]], float] = statistics.median,
) -> Figure:
    """Make a figure of its repeats: their median, unless ``pick`` says otherwise."""
    value = float(pick(repeats))
    return Figure(name, value, tuple(repeats), required, None if holds is None else holds(value), note)


def within(asked: float, share: float = 0.03) -> tuple[str, Callable[[float], bool]]:
    """Ask for a value within a share of ``asked``."""
    return f"{asked:.4g} ± {share:.0%}", lambda value: abs(value / asked - 1) <= share


def at_most(limit: float, unit: str = "") -> tuple[str, Callable[[float], bool]]:
    """Ask for a value of at most ``limit``."""
    return f"≤ {limit:.4g}{unit}", lambda value: value <= limit


def at_least(limit: float) -> tuple[str, Callable[[float], bool]]:
    """Ask for a value of at least ``limit``."""
    return f"≥ {limit:.4g}", lambda value: value >= limit


@dataclass(frozen=True, slots=True)
class About:
    """What ran, and where."""

    command: str
    driver: str
    date: str
    device: str
    plane: str
    took_s: float


def write(out: Path, stem: str, about: About, figures: Sequence[Figure], errors: dict[str, str]) -> None:
    """Write STEM.json and STEM.md into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    values = {figure.name: figure.value for figure in figures}
    values |= {f"error_{section}": text for section, text in errors.items()}
    summary = {"command": about.command, "driver": about.driver, "date": about.date, "figures": values}
    (out / f"{stem}.json").write_text(json.dumps(summary, indent=2) + "\n")
    lines = [
        f"# {stem}",
        "",
        f"{about.device}, driver {about.driver}, `{about.plane}` plane, {about.date}, {about.took_s:.0f} s:",
        f"`{about.command}`.",
        "Ratios compare runs of the same minutes, one in turn with the other. Spread: least / median / most.",
        "",
        "| figure | required | measured | spread | holds | how |",
        "|---|---|---|---|---|---|",
        *(figure.row() for figure in figures),
    ]
    if errors:
        lines += ["", "Not measured:", "", *(f"- {section}: {text}" for section, text in errors.items())]
    (out / f"{stem}.md").write_text("\n".join(lines) + "\n")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
