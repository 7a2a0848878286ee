"""Write the measured figures of the documents from the files in docs/results.

    python bench/document_figures.py           # rewrites README.md, CHANGELOG.md and docs/*.md
    python bench/document_figures.py --check   # says which of them are out of date, and changes nothing

A document contains each paragraph or table with figures twice: the template in a comment, and the result below it.

    <!-- begin generated: python bench/document_figures.py
    Two pods at 2:1 get {h200-guarantees > burst_ratio_2_1_1ms : .2f}.
    -->
    Two pods at 2:1 get 2.00.
    <!-- end generated -->

A figure is ``{FILE > STEP > STEP : FORMAT}``. FILE is the name of a JSON file in docs/results without its ending. If
only files FILE-SECTION.json exist, the figures of all sections are taken together. A step is

- the name of a figure, or a key; after a figure, ``spread``, ``repeats`` or ``limit``;
- for a list of rows: ``KEY=VALUE`` or ``KEY!=VALUE`` (the rows to keep), or a key (its values);
- for a list of numbers: an index, ``max``, ``min``, ``median``, ``sum``, ``count``, or ``below NUMBER`` (how many are).

FORMAT is Python's, with a factor if need be (``.2f*0.001``); or ``no`` or ``none``, which is this word for 0 and else a
whole number; or ``all``, which is this word for 1 and else ``98 % of the``. A spread is written as a range, a list with
commas. A figure that misses its requirement gets a note that says so. A format with so few digits that such a figure
seems to meet its requirement is an error. ``{missed}`` is a table of all such figures. A backslash at the end of a line
joins it with the next one.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
BEGIN = "<!-- begin generated: python bench/document_figures.py\n"
END = "<!-- end generated -->"
_WIDTH = 118
_BLOCK = re.compile(re.escape(BEGIN) + r"(?P<template>.*?\n)-->\n(?P<text>.*?)" + re.escape(END), re.DOTALL)
_FIGURE = re.compile(r"\{([^{}]+?)(?: : ([^{}\s]+))?\}")
_LIMIT = re.compile(r"([≥≤]) ([\d.]+)")
_SUMMARIES: dict[str, Callable[[list[Any]], Any]] = {
    "max": max,
    "min": min,
    "median": statistics.median,
    "sum": sum,
    "count": len,
}


class FigureError(Exception):
    """A document names a figure that no results file has."""


def documents() -> list[Path]:
    """Return the documents that may have figures."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def render(page: str, results: Path = RESULTS) -> str:
    """Return a page with every generated block rewritten. Raises FigureError."""

    def block(match: re.Match[str]) -> str:
        template = match["template"]
        text = _FIGURE.sub(lambda figure: _text(figure[1], figure[2] or ".3g", results), join(template))
        return f"{BEGIN}{template}-->\n{_wrap(text)}{END}"

    return _BLOCK.sub(block, page)


def templates(page: str) -> str:
    """Return a page as its author wrote it: templates in place of what is made of them, figures left out."""
    return _BLOCK.sub(lambda match: _FIGURE.sub("", join(match["template"])), page)


def join(template: str) -> str:
    """Join the lines of a template that end in a backslash with the next one."""
    return re.sub(r"\s*\\\n\s*", " ", template)


def _wrap(text: str) -> str:
    """Break long lines, but not those of tables."""
    lines = (line if line.startswith("|") or len(line) <= _WIDTH else _fill(line) for line in text.splitlines())
    return "\n".join(lines) + "\n"


def _fill(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, _WIDTH, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent)


def _text(path: str, style: str, results: Path) -> str:
    if path == "missed":
        return "\n".join(_missed(results))
    file, *steps = path.split(" > ")
    data = _load(file, results)
    try:
        value, detail = _find(data, steps)
        shown, missed = _format(value, style), detail.get("ok") is False
        return f"{shown} (**missed**, asked: {_asked(shown, detail, style)})" if missed else shown
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise FigureError(f"{{{path}}}: {type(error).__name__}: {error}") from error


def _load(name: str, results: Path) -> dict[str, Any]:
    """Read a results file, or what the files of its sections say together."""
    whole = results / f"{name}.json"
    files = [whole] if whole.exists() else sorted(results.glob(f"{name}-*.json"))
    read = [json.loads(file.read_text()) for file in files]
    if not read:
        raise FigureError(f"docs/results has no {name}.json")
    if len(read) == 1:
        return dict(read[0])
    return {part: {k: v for each in read for k, v in each.get(part, {}).items()} for part in ("figures", "details")}


def _find(data: dict[str, Any], steps: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return a value and, if it is the figure itself, what else is known of it."""
    value: Any = data
    if steps[0] in data.get("figures", {}):
        name, *steps = steps
        detail = data.get("details", {}).get(name, {})
        if not steps:
            return data["figures"][name], detail
        if steps == ["spread"]:
            return tuple(detail["spread"]), {}
        value = detail if steps[0] in ("repeats", "limit") else data["figures"][name]
    for step in steps:
        value = _step(value, step)
    return value, {}


def _step(value: Any, step: str) -> Any:
    if isinstance(value, dict):
        return value[step]
    if not isinstance(value, list):
        raise KeyError(step)
    if value and isinstance(value[0], dict):
        if step == "count":
            return len(value)
        key, equals, wanted = step.partition("=")
        if equals:
            differs = key.endswith("!")
            return [row for row in value if (str(row[key.rstrip("!")]) == wanted) is not differs]
        column = [row[step] for row in value if row[step] is not None]
        return column[0] if len(column) == 1 else column
    if step.startswith("below "):
        return sum(each < float(step.removeprefix("below ")) for each in value)
    return _SUMMARIES[step](value) if step in _SUMMARIES else value[int(step)]


def _format(value: Any, style: str) -> str:
    if isinstance(value, tuple):
        low, high = (_format(each, style) for each in value)
        return low if low == high else f"{low} to {high}"
    if isinstance(value, list):
        if not value:
            raise ValueError("an empty list")
        return ", ".join(_format(each, style) for each in value)
    if isinstance(value, str):
        return value
    if style in ("no", "none"):
        return f"{value:.0f}" if value else style
    if style == "all":
        return style if value == 1 else f"{_format(value, '.0%')} of the"
    shape, _, factor = style.partition("*")
    return format(value * float(factor) if factor else value, shape).replace("%", " %")


def _asked(shown: str, detail: dict[str, Any], style: str) -> str:
    """Return a limit in the units of the figure. Raises ValueError if the figure, as shown, seems to meet it."""
    limit = str(detail["limit"])
    if (match := _LIMIT.fullmatch(limit)) is None:
        return limit
    sign, bound = match.groups()
    if "%" in style or "*" in style:
        bound = _format(float(bound), style)
    met, asked = (float(each.removesuffix(" %")) for each in (shown, bound))
    if met >= asked if sign == "≥" else met <= asked:
        raise ValueError(f"{shown} is missed, and asked is {limit}: show more digits")
    return f"{sign} {bound}"


def _missed(results: Path) -> Iterator[str]:
    yield "| results | figure | asked | measured | what it is |"
    yield "|---|---|---|---|---|"
    for file in sorted(results.glob("*.json")):
        data = json.loads(file.read_text())
        if "runs" in data:  # merged from files of sections
            continue
        for name, detail in data.get("details", {}).items():
            if detail.get("ok") is False:
                yield f"| `{file.stem}` | `{name}` | {detail['limit']} | {detail['value']:.4g} | {detail['how']} |"


def main() -> None:
    """Write the documents, or say which are out of date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a document is out of date")
    options = parser.parse_args()
    stale = [file for file in documents() if render(file.read_text()) != file.read_text()]
    for file in stale:
        print(f"{file.relative_to(ROOT)}: {'out of date' if options.check else 'written'}")
        if not options.check:
            file.write_text(render(file.read_text()))
    sys.exit(bool(stale) and options.check)


if __name__ == "__main__":
    main()
