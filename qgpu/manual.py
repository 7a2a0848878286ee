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

#: The meaning of each exit code, with examples; docs/exit-codes.md says the same.
EXIT_CODES = {
    ExitCode.OK: "done",
    ExitCode.FAILED: "failed: a defect, or a full disk (then nothing was changed); the line or the log says which",
    ExitCode.USAGE: "usage: unknown option, quota 0 or 101, a wrong configuration file, a directory that cannot exist",
    ExitCode.NOT_SUPPORTED: "not supported: unknown driver branch; doctor found something missing",
    ExitCode.NO_PERMISSION: "no permission: changing things as a user who may only look; sharing real GPUs without "
    "being root",
    ExitCode.NOT_FOUND: "not found: no pod, GPU or policy has that name",
    ExitCode.NOT_LOADED: "not loaded: the driver or module of the requested plane is not loaded",
    ExitCode.TIMEOUT: "timeout: the daemon did not answer within --timeout; it drops the request unless it is already "
    "at work on it",
    ExitCode.GPU_LOST: "GPU lost: the data plane stopped answering",
    ExitCode.DAEMON_UNREACHABLE: "daemon unreachable: qgpud is not running, and did not start within --timeout",
    ExitCode.REFUSED: "refused: a grant does not fit or cannot be enforced; nothing was changed",
    ExitCode.DRIFT: "drift: doctor --self-test: shares differ from the quotas, without other pods on the GPU",
    ExitCode.ALREADY_RUNNING: "already running: another qgpud holds this runtime directory",
    ExitCode.INTERRUPTED: "interrupted: Ctrl-C; top, trace, report, web and qgpud exit with 0 on it",
    ExitCode.BROKEN_PIPE: "broken pipe: the reader closed the output before its end, as head -1 does; nothing more was "
    "done",
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
    for heading, arguments in (("ARGUMENTS", True), ("OPTIONS", False)):
        params = [each for each in command.get_params(context) if isinstance(each, click.Argument) is arguments]
        records = [record for each in params if (record := each.get_help_record(context))]
        lines += [f".SH {heading}"] if records else []
        for param, meaning in records:
            lines += [".TP", f".B {escape(param)}", escape(" ".join(meaning.split()))]
    if below:
        lines.append(".SH COMMANDS")
        for word, found in below:
            lines += [".TP", f".BR {escape(f'{name}-{word}')} ({section})", escape(found.get_short_help_str(200))]
    if examples:
        lines += [".SH EXAMPLES", ".nf", *(escape(line.strip()) for line in examples.strip().splitlines()), ".fi"]
    if context.parent is None:
        lines += [".SH EXIT STATUS"]
        for code in ExitCode:
            lines += [".TP", f".B {int(code)}", escape(EXIT_CODES[code])]
        lines += [".SH FILES", "/etc/qgpu/qgpud.toml, /run/qgpu, /var/lib/qgpu", ".SH SEE ALSO"]
        others = [f"{other} ({number})" for other, (_, number) in PROGRAMS.items() if other != name]
        lines += [*(f".BR {escape(other)}," for other in others), "/usr/share/doc/qgpu"]
    else:
        above, root = context.parent.command_path.replace(" ", "-"), context.find_root().info_name
        lines += [".SH SEE ALSO", *(f".BR {escape(each)} ({section})" for each in sorted({above, str(root)}))]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Escape text for troff."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in (".", "'") else text


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
