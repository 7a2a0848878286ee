"""Make one page from a folder of results: every figure with its requirement, and every picture.

    python bench/report.py docs/results            # writes docs/results/report.html
    python bench/report.py /tmp/results --to page.html

First it merges the sections of the suite that lie in the folder (h200-bench.json and .md), even if they come from
different runs. To take sections from another folder, copy their files here before.

The page is one file: the pictures are inside, with rivals side by side. Needs matplotlib. The figures in the documents
are written by document_figures.py.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import merge
from plots import Plot, svg
from script import TOGETHER

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1150px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px }
td, th { text-align: left; padding: 2px 10px 2px 0; border-bottom: 1px solid #e4e4e4; vertical-align: top }
code { font-size: 12px } .yes { color: #15732d } .no { color: #b3261e; font-weight: 600 } .about { color: #666 }
svg { max-width: 100%; height: auto }
"""
#: Merged files; the sections that they merge have files of their own.
_TOGETHER = ("h200-bench", "sim-bench", "h100-groups", "h100-real", "h200-groups", "h200-memory", "h200-real")


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page for results by name."""
    return "\n".join(
        [
            "<!doctype html><html lang=en><meta charset=utf-8><title>qgpu: results</title>",
            f"<style>{_STYLE}</style>",
            "<h1>qgpu: what was measured</h1>",
            *_overview(results),
            *(line for name, result in results.items() for line in _section(name, result)),
            "</html>\n",
        ]
    )


def _overview(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "<p>Spread: least to most of the repeats. Figures without a requirement are for comparison.</p><table>"
    yield "<tr><th>results<th>plane<th>hold<th>do not<th>taken"
    for name, result in results.items():
        held = [detail["ok"] for detail in result.get("details", {}).values()]
        missed = held.count(False)
        yield (
            f"<tr><td><a href=#{name}>{name}</a><td>{html.escape(str(result.get('plane', '')))}<td>{held.count(True)}"
            f"<td class={'no' if missed else 'yes'}>{missed}<td>{html.escape(str(result.get('date', '')))}"
        )
    yield "</table>"


def _section(name: str, result: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2 id={name}>{name}</h2>"
    about = (result.get(key) for key in ("device", "driver", "plane", "date"))
    yield f"<p class=about>{html.escape(', '.join(str(part) for part in about if part))}: "
    yield f"<code>{html.escape(str(result.get('command', '')))}</code></p>"
    plots = [Plot(**plot) for plot in result.get("plots", ())]
    if plots:
        picture = svg(plots)
        yield picture[picture.index("<svg") :]
    details = result.get("details") or {key: {"value": value} for key, value in result["figures"].items()}
    yield "<table><tr><th>figure<th>measured<th>spread<th>asked<th>holds<th>how"
    for figure, detail in details.items():
        ok = detail.get("ok")
        verdict = "" if ok is None else f"<span class={'yes' if ok else 'no'}>{'yes' if ok else 'no'}</span>"
        cells = (_short(detail["value"]), _spread(detail.get("spread")), detail.get("limit", ""))
        yield (
            f"<tr><td><code>{html.escape(figure)}</code>"
            + "".join(f"<td>{html.escape(cell)}" for cell in cells)
            + f"<td>{verdict}<td>{html.escape(detail.get('how', ''))}"
        )
    yield "</table>"
    for section, text in result.get("errors", {}).items():
        yield f"<p class=no>{html.escape(section)}: not measured: {html.escape(text)}</p>"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_short(each) for each in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _spread(spread: Sequence[float] | None) -> str:
    return f"{spread[0]:.4g} to {spread[1]:.4g}" if spread and spread[0] != spread[1] else ""


def results_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the results of a folder, except files that only merge others."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text())
        together = file.stem in _TOGETHER and any(folder.glob(f"{file.stem}-*.json"))
        figures = result.get("figures") if isinstance(result, dict) else None
        if (
            isinstance(figures, dict)
            and not any(isinstance(value, dict) for value in figures.values())
            and not together
        ):
            found[file.stem] = result
    return found


def _sections(folder: Path, stem: str) -> list[str]:
    """List the sections that have files of their own, those of the suite first and in its order."""
    found = sorted(file.stem.removeprefix(f"{stem}-") for file in folder.glob(f"{stem}-*.json"))
    suite = [each for each in TOGETHER if each in found]
    return suite + [each for each in found if each not in suite and each != "rows"]


def main() -> None:
    """Read, draw and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--to", type=Path, help="default: report.html in the folder")
    options = parser.parse_args()
    for stem in _TOGETHER:
        merge(options.folder, stem, _sections(options.folder, stem))
    results = results_in(options.folder)
    if not results:
        sys.exit(f"{options.folder}: no results in here; make some with: python bench/suite.py --out {options.folder}")
    file: Path = options.to or options.folder / "report.html"
    file.write_text(page(results))
    print(f"{file}: {len(results)} results")


if __name__ == "__main__":
    main()
