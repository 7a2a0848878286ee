"""``qgpuctl``: its commands and exit codes. Every error is one line on stderr and a documented exit code."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import click

import qgpu
from qgpu import entry_point
from qgpu.cli.context import Context
from qgpu.cli.params import Seconds
from qgpu.paths import default_runtime_dir

#: The module of each command. Only the module of the requested command is imported.
_COMMANDS = {
    "cdi": "qgpu.cli.cdi",
    "doctor": "qgpu.cli.doctor",
    "gpu": "qgpu.cli.gpu",
    "grant": "qgpu.cli.grant",
    "module": "qgpu.cli.module",
    "pod": "qgpu.cli.pod",
    "report": "qgpu.cli.report",
    "run": "qgpu.cli.run",
    "simulate": "qgpu.cli.simulate",
    "status": "qgpu.cli.gpu",
    "top": "qgpu.cli.top",
    "trace": "qgpu.cli.trace",
    "web": "qgpu.cli.web",
}


class _Lazy(click.Group):
    """A group that imports a command's module on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(_COMMANDS[cmd_name]), cmd_name)
        return command


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--runtime-dir", type=entry_point.Directory(), help="Directory of the daemon's control socket.")
@click.option("--timeout", type=Seconds(0.1, 3600), default=10.0, show_default=True, help="Seconds to wait for qgpud.")
@click.version_option(qgpu.__version__)
@click.pass_context
def command(ctx: click.Context, runtime_dir: Path | None, timeout: float) -> None:
    """Share GPUs among pods: show and change what each pod gets."""
    ctx.obj = Context(runtime_dir or default_runtime_dir(), timeout)


def main() -> None:
    """Run ``qgpuctl`` and exit with its code."""
    _open_streams()
    entry_point.run("qgpuctl", command)


def _open_streams() -> None:
    """Open /dev/null for closed standard streams. Otherwise the next opened file would take their number."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            taken = os.open(os.devnull, os.O_RDWR)
            if taken != fd:
                os.dup2(taken, fd)
                os.close(taken)
            setattr(sys, name, os.fdopen(fd, "r" if fd == 0 else "w", closefd=False))


if __name__ == "__main__":
    main()
