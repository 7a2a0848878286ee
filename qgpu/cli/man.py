"""``qgpuctl man``: manual pages, also where qgpu came as a wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import click

import qgpu
from qgpu import manual
from qgpu.cli.completion import commands
from qgpu.errors import InvalidValueError, UnknownNameError


@click.command()
@click.argument("words", metavar="[COMMAND]...", nargs=-1, shell_complete=commands)
@click.option("--write", "directory", type=click.Path(path_type=Path), help="Write all pages into this directory.")
def man(words: tuple[str, ...], directory: Path | None) -> None:
    """Show the manual page of a command, or of qgpud or qgpu-load."""
    if directory is not None:
        try:
            manual.write(qgpu.__version__, directory)
        except OSError as error:
            raise InvalidValueError(f"{directory}: {error.strerror}; give another --write") from error
        return
    name = "-".join(words if words[:1] and words[0] in manual.PROGRAMS else ("qgpuctl", *words))
    found = {file.rpartition(".")[0]: text for file, text in manual.every(qgpu.__version__)}
    if name not in found:
        raise UnknownNameError(f"{' '.join(words)}: there is no such command; see: qgpuctl --help")
    if sys.stdout.isatty() and shutil.which("man"):
        subprocess.run(["man", "-l", "-"], input=found[name], text=True, check=False)
    else:
        click.echo(found[name], nl=False)
