"""Prints answers: tables for people, versioned JSON for programs. It does not talk to the daemon."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import click

from qgpu import units
from qgpu.errors import InvalidValueError, QgpuError
from qgpu.linux import atomic_file

_F = TypeVar("_F", bound=Callable[..., Any])


def output_option(function: _F) -> _F:
    """Give a command the option ``-o table|json`` as its argument ``output``."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="How to print.",
    )(function)


def print_json(answer: dict[str, Any]) -> None:
    """Print the daemon's answer unchanged, except for the envelope's ``ok``."""
    click.echo(json.dumps({key: value for key, value in answer.items() if key != "ok"}, indent=2))


def print_as(output: str, answer: dict[str, Any], header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print an answer, as JSON or as a table of ``rows``."""
    if output == "json":
        print_json(answer)
    else:
        print_table(header, rows)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below their header, in columns of fitting width."""
    click.echo("\n".join(table(header, rows)))


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
    """Format a time, or none."""
    return "-" if duration_ns is None else units.format_duration(duration_ns)


def cores(quota: int | None) -> str:
    """Format a quota, or none."""
    return "-" if quota is None else f"{quota} %"
