"""Prints answers: tables for people, versioned JSON for programs. It does not talk to the daemon."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import click

from qgpu import units
from qgpu.errors import InvalidValueError, QgpuError
from qgpu.linux import atomic_file

_F = TypeVar("_F", bound=Callable[..., Any])


def output_option(function: _F) -> _F:
    """Give a command the option ``-o table|json``, and ``--json``, as its argument ``output``."""
    function = click.option("--json", "output", flag_value="json", help="As -o json.")(function)
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="How to print.",
    )(function)


#: Quantities of answers whose names lack the unit, with names that have it. Programs get both.
_UNITS = {
    "cores": "cores_percent",
    "sm": "sm_percent",
    "offline_floor": "offline_floor_percent",
    "memory": "memory_bytes",
    "memory_used": "memory_used_bytes",
    "held": "held_bytes",
    "memory_yielded": "memory_yielded_bytes",
    "memory_shortage": "memory_shortage_bytes",
    "suspended_memory": "suspended_memory_bytes",
    **{
        name: f"{name}_ratio"
        for name in (
            "error",
            "gated",
            "idle",
            "memory_overcommit",
            "engine_active",
            "share",
            "switching",
            "useful",
            "utilization",
            "vs_alone",
        )
    },
}


def with_units(value: Any) -> Any:
    """Return an answer with the unit in the name of every quantity, beside the names without."""
    if isinstance(value, list):
        return [with_units(each) for each in value]
    if not isinstance(value, dict):
        return value
    named = {key: with_units(each) for key, each in value.items()}
    return named | {_UNITS[key]: each for key, each in value.items() if key in _UNITS}


def print_json(answer: dict[str, Any]) -> None:
    """Print the daemon's answer, without the envelope's ``ok``."""
    click.echo(json.dumps(with_units({key: value for key, value in answer.items() if key != "ok"}), indent=2))


def print_facts(facts: Sequence[tuple[str, str]], indent: str = "") -> None:
    """Print names and values below each other."""
    width = max(len(name) for name, _ in facts)
    click.echo("\n".join(f"{indent}{name.ljust(width)}  {value}" for name, value in facts))


def print_as(
    output: str,
    answer: dict[str, Any],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    droppable: Sequence[str] = (),
) -> None:
    """Print an answer, as JSON or as a table of ``rows``; ``droppable`` is as for ``fit_table``."""
    if output == "json":
        print_json(answer)
    else:
        print_table(header, rows, droppable)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], droppable: Sequence[str] = ()) -> None:
    """Print rows below their header, in columns of fitting width; ``droppable`` is as for ``fit_table``."""
    width = terminal_width() if droppable else 0
    click.echo("\n".join(fit_table(header, rows, droppable, width) if width else table(header, rows)))


def terminal_width() -> int:
    """Return how many characters fit into a line of the terminal; 0 where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def fit_table(header: Sequence[str], rows: Sequence[Sequence[str]], droppable: Sequence[str], width: int) -> list[str]:
    """Return rows below their header as lines of at most ``width`` characters.

    Columns without content are left out first, then those of ``droppable`` in this order; then lines are cut.
    """
    empty = [name for name, *cells in zip(header, *rows, strict=True) if all(cell == "-" for cell in cells)]
    to_drop = [*(name for name in reversed(empty) if rows), *droppable]
    while max(map(len, lines := table(header, rows))) > width and to_drop:
        kept = [at for at, name in enumerate(header) if name != to_drop[0]]
        header, *rows = ([row[at] for at in kept] for row in (header, *rows))
        del to_drop[0]
    return [each if len(each) <= width else f"{each[: width - 1]}…" for each in lines]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows below their header as aligned lines."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Open the output file of a command before its work begins. The file appears complete or not at all.

    Raises InvalidValueError if it cannot be written, QgpuError if the disk is full.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(atomic_file.replacing(path))
        except OSError as error:
            raise InvalidValueError(f"{path}: {error.strerror}; give another --out") from error
        try:
            yield file
            stack.close()
        except OSError as error:
            raise QgpuError(f"{path}: {error.strerror or error}; nothing was written there") from error


def memory(size: int | None) -> str:
    """Format a number of bytes, or no limit."""
    return "-" if size is None else units.format_memory(size)


def duration(duration_ns: int | None) -> str:
    """Format a time in ns, or none."""
    return "-" if duration_ns is None else units.format_duration(duration_ns)


def timestamp(seconds: float | None) -> str:
    """Format a time in seconds since the epoch as events have it (UTC, to the millisecond), or an unknown one."""
    if not seconds:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def percentage(value: float | None) -> str:
    """Format a part of a whole, 0 to 1, as per cent with one decimal, or an unknown one."""
    return "-" if value is None else f"{value:.1%}"


def cores(quota: int | None) -> str:
    """Format a quota in per cent, or none."""
    return "-" if quota is None else units.format_percent(quota)
