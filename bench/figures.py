"""Figures: what was measured, how far it spread, what was asked of it; and the files they go to."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from plots import Plot

#: What is asked of a figure, in words and as a test; or nothing.
Asked = tuple[str, Callable[[float], bool] | None]
NOTHING: Asked = ("", None)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure, with the repeats that it is the median of (or ``pick`` of)."""

    name: str
    value: Any
    repeats: Sequence[float] = ()
    required: str = ""
    passed: bool | None = None
    note: str = ""

    def detail(self) -> dict[str, Any]:
        """Return what there is to say beside the value."""
        spread = [min(self.repeats), max(self.repeats)] if self.repeats else None
        return {
            "value": self.value,
            "limit": self.required,
            "ok": self.passed,
            "spread": spread,
            "repeats": list(self.repeats),
            "how": self.note,
        }

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


def between(low: float, high: float) -> tuple[str, Callable[[float], bool]]:
    """Ask for a value from ``low`` to ``high``."""
    return f"{low:.4g} to {high:.4g}", lambda value: low <= value <= high


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


def write(
    out: Path,
    stem: str,
    about: About,
    figures: Sequence[Figure],
    errors: Mapping[str, str],
    plots: Sequence[Plot] = (),
) -> None:
    """Write STEM.json and STEM.md into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    values = {figure.name: figure.value for figure in figures}
    values |= {f"error_{section}": text for section, text in errors.items()}
    summary = {
        **asdict(about),
        "figures": values,
        "details": {figure.name: figure.detail() for figure in figures},
        "errors": dict(errors),
        "plots": [asdict(plot) for plot in plots],
    }
    text = json.dumps(_told(summary), indent=1, ensure_ascii=False, allow_nan=False)
    (out / f"{stem}.json").write_text(text + "\n")
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


def read(file: Path) -> tuple[About, list[Figure], dict[str, str]]:
    """Read back what ``write`` wrote, but for the plots."""
    raw = json.loads(file.read_text())
    about = About(**{field.name: raw[field.name] for field in fields(About)})
    figures = [
        Figure(name, raw["figures"][name], tuple(told["repeats"]), told["limit"], told["ok"], told["how"])
        for name, told in raw["details"].items()
    ]
    return about, figures, raw["errors"]


def merge(out: Path, stem: str, sections: Sequence[str]) -> None:
    """Write STEM.json and STEM.md from the files of those sections that there are, if any: STEM-SECTION.json."""
    files = [file for section in sections if (file := out / f"{stem}-{section}.json").exists()]
    if not files:
        return
    parts = [read(file) for file in files]
    abouts = [about for about, _, _ in parts]
    first, last = (pick(abouts, key=lambda about: about.date) for pick in (min, max))
    about = replace(
        last,
        date=last.date if first.date == last.date else f"{first.date} to {last.date}",
        command="; ".join(dict.fromkeys(about.command for about in abouts)),
        took_s=sum(about.took_s for about in abouts),
    )
    figures = [figure for _, found, _ in parts for figure in found]
    write(out, stem, about, figures, {name: text for _, _, errors in parts for name, text in errors.items()})


def _told(value: Any) -> Any:
    """Put null for what is no number: JSON knows no NaN."""
    if isinstance(value, dict):
        return {name: _told(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_told(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
