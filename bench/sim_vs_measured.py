"""Compare the simulated pGPU with measurements on an H200, and write the comparison.

    python bench/sim_vs_measured.py [--out docs/results]

Writes sim-vs-measured.json, .md and .svg (the picture needs matplotlib) and prints one line. The rows are in
``sim_measured.py``; the test suite checks each of them against the tolerance.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from sim_measured import ROWS, TOLERANCE, Outcome, compare

COMMAND = "python bench/sim_vs_measured.py"
DRIVER = "580.159.04 (NVIDIA H200), against the simulated H200"


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    out: Path = parser.parse_args().out
    outcomes = [compare(row) for row in ROWS]
    out.mkdir(parents=True, exist_ok=True)
    (out / "sim-vs-measured.json").write_text(json.dumps(as_json(outcomes), indent=1, ensure_ascii=False) + "\n")
    (out / "sim-vs-measured.md").write_text("\n".join(as_markdown(outcomes)) + "\n")
    draw(outcomes, out / "sim-vs-measured.svg")
    print(summary(outcomes))


def summary(outcomes: Sequence[Outcome]) -> str:
    """Summarize the comparison in one line."""
    within = sum(outcome.within for outcome in outcomes)
    held = [abs(outcome.deviation) for outcome in outcomes if outcome.within]
    return (
        f"{within} of {len(outcomes)} figures within {TOLERANCE:.0%}, those by {sum(held) / len(held):.1%} on average; "
        f"{len(outcomes) - within} outside"
    )


def as_json(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Return the comparison as JSON data."""
    figures = {
        outcome.row.key: {
            "measured": outcome.row.measured,
            "simulated": round(outcome.simulated, 5),
            "deviation": round(outcome.deviation, 4),
        }
        | ({"missed": outcome.row.missed} if outcome.row.missed else {})
        for outcome in outcomes
    }
    date = datetime.now(UTC).date().isoformat()
    held = [abs(outcome.deviation) for outcome in outcomes if outcome.within]
    return {
        "command": COMMAND,
        "driver": DRIVER,
        "date": date,
        "tolerance": TOLERANCE,
        "rows": len(outcomes),
        "rows_within": len(held),
        "mean_deviation_within": round(sum(held) / len(held), 4),
        "figures": figures,
    }


def as_markdown(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Return the comparison as tables, one for each kind of experiment."""
    yield "# The simulated pGPU beside an H200"
    yield ""
    yield f"Written by `{COMMAND}`. {summary(outcomes)}. **Bold** rows are outside, each with the reason."
    yield "What the model is and where it ends: [simulator.md](../simulator.md)."
    for table, group in groupby(outcomes, key=lambda outcome: outcome.row.table):
        yield from (
            "",
            f"## {table.capitalize()}",
            "",
            "| | measured | simulated | off by | |",
            "|---|---|---|---|---|",
        )
        for outcome in group:
            bold = "" if outcome.within else "**"
            yield (
                f"| {outcome.row.name} | {outcome.row.measured:.4g} | {outcome.simulated:.4g} "
                f"| {bold}{outcome.deviation:+.1%}{bold} | {outcome.row.missed} |"
            )


def draw(outcomes: Sequence[Outcome], file: Path) -> None:
    """Draw simulated over measured values, and the error of each row."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "qgpu"  # the same figures make the same file
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    scale, off = figure.subplots(1, 2, width_ratios=(1, 1.5))
    low, high = min(o.row.measured for o in outcomes), max(o.row.measured for o in outcomes)
    scale.plot([low, high], [low, high], color="0.8", zorder=0)
    off.axhspan(-100 * TOLERANCE, 100 * TOLERANCE, color="0.92", zorder=0)
    at = 0
    for table, group in groupby(outcomes, key=lambda outcome: outcome.row.table):
        rows = list(group)
        measured, simulated = [o.row.measured for o in rows], [o.simulated for o in rows]
        dots = scale.scatter(measured, simulated, s=14, label=table)
        deviations = [100 * o.deviation for o in rows]
        off.scatter(range(at, at + len(rows)), deviations, s=14, color=dots.get_facecolor())
        at += len(rows)
    scale.set(xscale="log", yscale="log", xlabel="measured on an H200", ylabel="simulated")
    off.set(xlabel="figures, in the order of the tables", ylabel="off by, %", xticks=[])
    off.set_title(f"grey: the tolerance of {TOLERANCE:.0%}; outside: excused by name", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main()
