"""Generate manual pages from the programs: manpages.py VERSION DIRECTORY.

One page for each command that does something, qgpuctl-pod-list(1) and so on, and one each for qgpuctl(1) and qgpud(8).
Their text is that of ``--help``; this file adds only the frame.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from qgpu.cli.main import command as qgpuctl
from qgpu.daemon.main import command as qgpud
from qgpu.errors import ExitCode


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
    text = (command.help or "").strip()
    summary = text.partition("\n")[0].rstrip(".")
    lines = [f'.TH {name.upper()} {section} "" "qgpu {version}" "qgpu"', ".SH NAME", f"{name} \\- {escape(summary)}"]
    synopsis = " ".join(command.collect_usage_pieces(context))
    lines += [".SH SYNOPSIS", f".B {escape(context.command_path)}", escape(synopsis), ".SH DESCRIPTION"]
    lines += [".PP" if not line.strip() else escape(line.strip()) for line in text.splitlines()]
    options = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
    if options:
        lines.append(".SH OPTIONS")
        for option, meaning in options:
            lines += [".TP", f".B {escape(option)}", escape(" ".join(meaning.split()))]
    if below:
        lines.append(".SH COMMANDS")
        for word, found in below:
            lines += [".TP", f".BR {escape(f'{name}-{word}')} ({section})", escape(found.get_short_help_str(200))]
    if context.parent is None:
        lines += [".SH EXIT STATUS"]
        for code in ExitCode:
            lines += [".TP", f".B {int(code)}", code.name.lower().replace("_", " ")]
        lines += [".SH FILES", "/etc/qgpu/qgpud.toml, /run/qgpu, /var/lib/qgpu", ".SH SEE ALSO"]
        lines += [".BR qgpuctl (1)," if section == 8 else ".BR qgpud (8),", "/usr/share/doc/qgpu"]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Escape text for troff."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in (".", "'") else text


def main() -> None:
    """Write the pages."""
    version, directory = sys.argv[1], Path(sys.argv[2])
    directory.mkdir(parents=True, exist_ok=True)
    for program, name, section in ((qgpuctl, "qgpuctl", 1), (qgpud, "qgpud", 8)):
        for file, text in pages(
            program, click.Context(program, None, name, **program.context_settings), section, version
        ):
            (directory / file).write_text(text)


if __name__ == "__main__":
    main()
