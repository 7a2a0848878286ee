"""Manual pages from the programs: one for each program, and for each command of qgpuctl that does something.

Their text is that of ``--help``; this file adds only the frame. ``python -m qgpu.manual VERSION DIRECTORY`` writes
them all.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from qgpu.entry_point import EXAMPLES
from qgpu.errors import ExitCode

#: The programs with a manual page, where their command is, and their section.
PROGRAMS = {
    "qgpuctl": ("qgpu.cli.main", 1),
    "qgpud": ("qgpu.daemon.main", 8),
    "qgpu-load": ("qgpu.load.main", 1),
}


def every(version: str) -> Iterator[tuple[str, str]]:
    """Yield file name and text of every page."""
    for name, (module, section) in PROGRAMS.items():
        command: click.Command = importlib.import_module(module).command
        yield from pages(command, click.Context(command, None, name, **command.context_settings), section, version)


def write(version: str, directory: Path) -> None:
    """Write every page into a directory. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in every(version):
        (directory / file).write_text(text)


def pages(command: click.Command, context: click.Context, section: int, version: str) -> Iterator[tuple[str, str]]:
    """Yield file name and text of the pages of a command and its subcommands."""
    name = context.command_path.replace(" ", "-")
    below: list[tuple[str, click.Command]] = []
    if isinstance(command, click.Group):
        for word in command.list_commands(context):
            found = command.get_command(context, word)
            if found is not None and not found.hidden:
                below.append((word, found))
    yield f"{name}.{section}", page(command, context, section, version, below)
    for word, found in below:
        yield from pages(found, click.Context(found, context, word), section, version)


def page(
    command: click.Command, context: click.Context, section: int, version: str, below: list[tuple[str, click.Command]]
) -> str:
    """Return one page in man(7)."""
    name = context.command_path.replace(" ", "-")
    text, _, examples = (command.help or "").replace("\b\n", "").strip().partition(EXAMPLES)
    summary = text.partition("\n")[0].rstrip(".")
    lines = [
        f'.TH {escape(name.upper())} {section} "" "qgpu {version}" "qgpu"',
        ".SH NAME",
        f"{name} \\- {escape(summary)}",
    ]
    synopsis = " ".join(command.collect_usage_pieces(context))
    lines += [".SH SYNOPSIS", f".B {escape(context.command_path)}", escape(synopsis), ".SH DESCRIPTION"]
    lines += [".PP" if not line.strip() else escape(line.strip()) for line in text.strip().splitlines()]
    options = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
    if options:
        lines.append(".SH OPTIONS")
        for option, meaning in options:
            lines += [".TP", f".B {escape(option)}", escape(" ".join(meaning.split()))]
    if below:
        lines.append(".SH COMMANDS")
        for word, found in below:
            lines += [".TP", f".BR {escape(f'{name}-{word}')} ({section})", escape(found.get_short_help_str(200))]
    if examples:
        lines += [".SH EXAMPLES", ".nf", *(escape(line.strip()) for line in examples.strip().splitlines()), ".fi"]
    if context.parent is None:
        lines += [".SH EXIT STATUS"]
        for code in ExitCode:
            lines += [".TP", f".B {int(code)}", code.name.lower().replace("_", " ")]
        lines += [".SH FILES", "/etc/qgpu/qgpud.toml, /run/qgpu, /var/lib/qgpu", ".SH SEE ALSO"]
        others = [f"{other} ({number})" for other, (_, number) in PROGRAMS.items() if other != name]
        lines += [*(f".BR {escape(other)}," for other in others), "/usr/share/doc/qgpu"]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Escape text for troff."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in (".", "'") else text


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
