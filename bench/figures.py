"""Figures: what was measured, its spread, its requirement, and its results files."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from plots import Plot

#: The requirement of a figure, in words and as a test; None for none.
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
        """Return the note beside the value."""
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
    """Make a figure from its repeats: their median, or the result of ``pick``."""
    value = float(pick(repeats))
    return Figure(name, value, tuple(repeats), required, None if holds is None else holds(value), note)


def within(asked: float, share: float = 0.03) -> tuple[str, Callable[[float], bool]]:
    """Require a value within a relative deviation from ``asked``."""
    return f"{asked:.4g} ± {share:.0%}", lambda value: abs(value / asked - 1) <= share


def at_most(limit: float, unit: str = "") -> tuple[str, Callable[[float], bool]]:
    """Require a value of at most ``limit``."""
    return f"≤ {limit:.4g}{unit}", lambda value: value <= limit


def between(low: float, high: float) -> tuple[str, Callable[[float], bool]]:
    """Require a value from ``low`` to ``high``."""
    return f"{low:.4g} to {high:.4g}", lambda value: low <= value <= high


def at_least(limit: float) -> tuple[str, Callable[[float], bool]]:
    """Require a value of at least ``limit``."""
    return f"≥ {limit:.4g}", lambda value: value >= limit


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What ran, and where."""

    command: str
    driver: str
    date: str
    device: str
    plane: str
    took_s: float
    #: Digest of the measured package. Empty if the result is older than this field.
    sources: str = ""

    def line(self) -> str:
        """Say in a line of Markdown what ran, and where."""
        sources = f", sources {self.sources}" if self.sources else ""
        where = f"{self.device}, driver {self.driver}, `{self.plane}` plane"
        return f"{where}, {self.date}, {self.took_s:.0f} s{sources}: `{self.command}`."


def write(
    out: Path,
    stem: str,
    about: RunInfo,
    figures: Sequence[Figure],
    errors: Mapping[str, str],
    plots: Sequence[Plot] = (),
) -> None:
    """Write STEM.json and STEM.md into ``out``."""
    summary = {**_summary(about, figures, errors), "plots": [asdict(plot) for plot in plots]}
    lines = [
        f"# {stem}",
        "",
        about.line(),
        "Ratios compare runs of the same minutes, one in turn with the other. Spread: least / median / most.",
        *_table(figures),
        *_missing(errors),
    ]
    _put(out, stem, summary, lines)


def read(file: Path) -> tuple[RunInfo, list[Figure], dict[str, str]]:
    """Read back what ``write`` wrote, without the plots."""
    raw = json.loads(file.read_text())
    about = RunInfo(**{field.name: raw[field.name] for field in fields(RunInfo) if field.name in raw})
    figures = [
        Figure(name, raw["figures"][name], tuple(told["repeats"]), told["limit"], told["ok"], told["how"])
        for name, told in raw["details"].items()
    ]
    return about, figures, raw["errors"]


def merge(out: Path, stem: str, sections: Sequence[str]) -> None:
    """Write STEM.json and STEM.md from the existing section files STEM-SECTION.json, if any.

    Sections may come from different runs: each figure names its section, and each section its run.
    """
    files = {section: file for section in sections if (file := out / f"{stem}-{section}.json").exists()}
    if not files:
        return
    parts = {section: read(file) for section, file in files.items()}
    runs = {section: about for section, (about, _, _) in parts.items()}
    first, last = (pick(runs.values(), key=lambda about: about.date) for pick in (min, max))
    about = replace(
        last,
        date=last.date if first.date == last.date else f"{first.date} to {last.date}",
        command="; ".join(dict.fromkeys(about.command for about in runs.values())),
        took_s=sum(about.took_s for about in runs.values()),
        sources=", ".join(dict.fromkeys(about.sources or "not noted" for about in runs.values())),
    )
    figures = [figure for _, found, _ in parts.values() for figure in found]
    errors = {name: text for _, _, errors in parts.values() for name, text in errors.items()}
    summary = {**_summary(about, figures, errors), "runs": {name: asdict(run) for name, run in runs.items()}}
    lines = [
        f"# {stem}",
        "",
        f"{len(runs)} sections; each says which run it is from. In each, ratios compare runs of the same minutes, one",
        "in turn with the other. Spread: least / median / most.",
    ]
    for section, (run, found, _) in parts.items():
        lines += ["", f"## {section}", "", run.line(), *_table(found)]
        for figure in found:
            summary["details"][figure.name]["section"] = section
    _put(out, stem, summary, [*lines, *_missing(errors)])


def _summary(about: RunInfo, figures: Sequence[Figure], errors: Mapping[str, str]) -> dict[str, Any]:
    values = {figure.name: figure.value for figure in figures}
    return {
        **asdict(about),
        "figures": values | {f"error_{section}": text for section, text in errors.items()},
        "details": {figure.name: figure.detail() for figure in figures},
        "errors": dict(errors),
    }


def _table(figures: Sequence[Figure]) -> list[str]:
    head = ["", "| figure | required | measured | spread | holds | how |", "|---|---|---|---|---|---|"]
    return [*head, *(figure.row() for figure in figures)]


def _missing(errors: Mapping[str, str]) -> list[str]:
    return ["", "Not measured:", "", *(f"- {section}: {text}" for section, text in errors.items())] if errors else []


def _put(out: Path, stem: str, summary: Mapping[str, Any], lines: Sequence[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_told(summary), indent=1, ensure_ascii=False, allow_nan=False)
    (out / f"{stem}.json").write_text(text + "\n")
    (out / f"{stem}.md").write_text("\n".join(lines) + "\n")


def _told(value: Any) -> Any:
    """Replace values that are not numbers by null: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _told(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_told(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
