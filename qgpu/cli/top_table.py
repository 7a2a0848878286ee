"""The table of ``qgpuctl top``: its columns, what each costs in width, and which are left out where it is narrow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qgpu import units
from qgpu.cli.output import cores, memory
from qgpu.cli.styled_text import Line, Style, shortened

#: Shares, 0 to 1, oldest first.
Shares = Sequence[float]

_LEVELS = "▁▂▃▄▅▆▇█"
_FULL, _TRACK, _TICK = "█", "·", "│"
#: Columns grow to these widths where there is room.
_WIDEST = {"POD": 63, "SHARE BAR": 20, "HISTORY": 30}
_UNLIMITED = 10_000
#: Shown in place of the share of a pod that is off its card, by its state.
_OFF = {"waiting": "off", "suspended": "off", "suspending": "leaves", "resuming": "comes"}

_Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One column; columns with a higher ``rank`` are left out first."""

    name: str
    width: int
    rank: int
    cell: Callable[[_Row, int, Shares], tuple[str, Style]]
    right: bool = False

    def fitted(self, text: str) -> str:
        """Return a text in the column's width."""
        return text[: self.width].rjust(self.width) if self.right else text[: self.width].ljust(self.width)


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that fit, each in its width."""

    columns: tuple[Column, ...]

    def header(self) -> Line:
        """Return the line above the pods."""
        names = (column.fitted("" if column.name == "SHARE BAR" else column.name) for column in self.columns)
        return (("  " + " ".join(names), Style.QUIET),)

    def row(self, row: _Row, history: Mapping[tuple[int, str], Shares], *, chosen: bool) -> Line:
        """Return a pod's line, marked if it is below its quota."""
        past = history.get((row["gpu"], row["pod"]), ())
        mark = ("  ", Style.PLAIN)
        if row["below_quota"]:
            mark = ("! ", Style.BAD) if waits(row) else ("~ ", Style.NOTED)
        pieces = [mark]
        for column in self.columns:
            text, style = column.cell(row, column.width, past)
            pieces += [(column.fitted(text), style), (" ", Style.PLAIN)]
        return tuple((text, Style.CHOSEN if chosen else style) for text, style in pieces[:-1])


def layout(rows: Sequence[_Row], width: int, *, history: bool = True) -> Columns:
    """Return the columns for these rows on a terminal ``width`` characters wide; 0 is any width.

    A single table has no ``history``.
    """
    longest = max((len(row["pod"]) for row in rows), default=3)
    room = (width or _UNLIMITED) - 2
    found = [replace(column, width=max(column.width, _content(column, rows))) for column in _COLUMNS]
    if not history:
        found = [column for column in found if column.name != "HISTORY"]
    while len(found) > 1 and sum(column.width + 1 for column in found) > room + 1:
        found.remove(max(found, key=lambda column: column.rank))
    spare = room + 1 - sum(column.width + 1 for column in found)
    for name in ("POD", "SHARE BAR", "HISTORY"):
        for at, column in enumerate(found):
            if column.name == name:
                widest = max(column.width, min(_WIDEST[name], longest)) if name == "POD" else _WIDEST[name]
                more = max(0, min(spare, widest - column.width))
                found[at], spare = replace(column, width=column.width + more), spare - more
    return Columns(tuple(found))


def waits(row: _Row) -> bool:
    """Tell whether a pod lacks part of its quota; others ask for less, or their policy guarantees none."""
    return bool(row["below_quota"]) and str(row["below_quota_reason"]).startswith("waits")


def _content(column: Column, rows: Sequence[_Row]) -> int:
    """Return what the longest cell of a column takes, where columns are not of a free width."""
    if column.name in _WIDEST:
        return 0
    return max((len(column.cell(row, _UNLIMITED, ())[0]) for row in rows), default=0)


def _pod(row: _Row, width: int, _past: Shares) -> tuple[str, Style]:
    return shortened(row["pod"], width), Style.ONLINE if row["class"] == "online" else Style.PLAIN


def _share(row: _Row, _width: int, _past: Shares) -> tuple[str, Style]:
    if (off := _OFF.get(row["state"])) is not None:
        return off, Style.NOTED
    style = Style.PLAIN if row["busy"] else Style.QUIET
    if row["below_quota"]:
        style = Style.BAD if waits(row) else Style.NOTED
    return f"{row['share']:.1%}", style


def _bar(row: _Row, width: int, _past: Shares) -> tuple[str, Style]:
    """Draw a share as a bar, with a stroke at the quota."""
    bar = (_FULL * round(row["share"] * width)).ljust(width, _TRACK)
    if row["cores"] is not None:
        at = min(width - 1, round(row["cores"] / 100 * width))
        bar = f"{bar[:at]}{_TICK}{bar[at + 1 :]}"
    return bar, _share(row, width, ())[1] if row["below_quota"] else Style.GOOD


def _sparkline(row: _Row, width: int, past: Shares) -> tuple[str, Style]:
    """Draw the last shares; the highest block is the most of them, or the quota."""
    recent = list(past)[-width:]
    most = max([*recent, (row["cores"] or 0) / 100, 0.01])
    levels = (_LEVELS[min(len(_LEVELS) - 1, int(share / most * len(_LEVELS)))] for share in recent)
    return "".join(levels).rjust(width), Style.QUIET


def _memory(row: _Row, _width: int, _past: Shares) -> tuple[str, Style]:
    full = row["memory"] is not None and row["held"] > 0.95 * row["memory"]
    return f"{memory(row['held'])}/{memory(row['memory'])}", Style.BAD if full else Style.PLAIN


def _gate(row: _Row, _width: int, _past: Shares) -> tuple[str, Style]:
    gated = row["gated"]
    return "-" if gated is None else f"{gated:.0%}", Style.QUIET


def _wait(row: _Row, _width: int, _past: Shares) -> tuple[str, Style]:
    expected_ns, target_ns = row["expected_wait_p99_ns"], row["latency_target_ns"]
    if expected_ns is None:
        return "-", Style.QUIET
    return units.format_duration(expected_ns), Style.BAD if target_ns and expected_ns > target_ns else Style.PLAIN


_COLUMNS = (
    Column("GPU", 3, 3, lambda row, _width, _past: (str(row["gpu"]), Style.QUIET), right=True),
    Column("POD", 12, 0, _pod),
    Column("CLASS", 7, 6, lambda row, _width, _past: (row["class"], Style.QUIET)),
    Column("SHARE", 6, 1, _share, right=True),
    Column("QUOTA", 5, 2, lambda row, _width, _past: (cores(row["cores"]), Style.PLAIN), right=True),
    Column("SHARE BAR", 8, 4, _bar),
    Column("HISTORY", 8, 5, _sparkline),
    Column("GATED", 5, 8, _gate, right=True),
    Column("P99 +", 7, 9, _wait, right=True),
    Column("MEMORY/LIMIT", 12, 7, _memory, right=True),
)
