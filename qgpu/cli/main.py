"""``qgpuctl``: its commands and exit codes. Every error is one line on stderr and a documented exit code."""

from __future__ import annotations

import importlib
import io
import os
import sys
from pathlib import Path

import click
from click.shell_completion import CompletionItem

import qgpu
from qgpu import entry_point
from qgpu.cli import examples
from qgpu.cli.context import Context
from qgpu.entry_point import Seconds
from qgpu.paths import client_runtime_dir

#: The module of each command, and its summary. Only the module of the requested command is imported.
_COMMANDS = {
    "cdi": ("qgpu.cli.cdi", "Files for container runtimes: CDI specification and seccomp profile."),
    "completion": ("qgpu.cli.completion", "Print the completion of qgpuctl for a shell."),
    "doctor": ("qgpu.cli.doctor", "Check what qgpu needs."),
    "events": ("qgpu.cli.events", "Show the last changes of policies, grants and pods, with who made them."),
    "gpu": ("qgpu.cli.gpu", "List pGPUs and set how they are shared."),
    "grant": ("qgpu.cli.grant", "List and drop what Kubernetes claims hold."),
    "man": ("qgpu.cli.man", "Show the manual page of a command, or of qgpud or qgpu-load."),
    "group": ("qgpu.cli.group", "Run pods that trust each other side by side under one grant."),
    "module": ("qgpu.cli.module", "Show the kernel module, and switch it off and on."),
    "pod": ("qgpu.cli.pod", "List pods, change their grants, suspend and resume them."),
    "report": (
        "qgpu.cli.report",
        "Record for some seconds and write an HTML page: shares, turns, gates, suspensions, refusals.",
    ),
    "run": ("qgpu.cli.run", "Run a command as a pod and end with its exit code."),
    "simulate": ("qgpu.cli.simulate", "Play a scenario (TOML) on a simulated pGPU and report what its pods got."),
    "status": ("qgpu.cli.status", "Show what the daemon runs on, how its pGPUs are shared, and what pods get."),
    "top": ("qgpu.cli.top", "Show each pod's share of each pGPU, live."),
    "trace": ("qgpu.cli.trace", "Record when pods run, and write a trace for ui.perfetto.dev."),
    "web": ("qgpu.cli.web", "Serve a page with live shares and a timeline to browsers on this host."),
}


class _LazyGroup(click.Group):
    """A group that imports a command's module on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        if cmd_name not in self.commands:
            self.add_command(getattr(importlib.import_module(_COMMANDS[cmd_name][0]), cmd_name), cmd_name)
            _document(self.commands[cmd_name], cmd_name)
        return self.commands[cmd_name]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        wrong = args[0].isidentifier() and args[0] not in _COMMANDS
        if wrong and not ctx.resilient_parsing:  # click would look for likely ones among the imported
            raise click.NoSuchCommand(args[0], possibilities=_COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if not incomplete or incomplete[0].isalnum():
            names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
            return [CompletionItem(name, help=_COMMANDS[name][1]) for name in names]
        return click.Command.shell_complete(self, ctx, incomplete)


def _document(command: click.Command, path: str) -> None:
    """Give a command and those below it their examples, and their arguments what these mean."""
    if lines := examples.EXAMPLES.get(path) or [examples.EXAMPLES[each][0] for each in examples.GROUPS.get(path, ())]:
        entry_point.show_examples(command, lines)
    for param in command.params:
        if isinstance(param, click.Argument):
            param.help = examples.ARGUMENTS.get((path.partition(" ")[0], str(param.name)))
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            _document(below, f"{path} {name}")


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--runtime-dir", type=entry_point.Directory(), help="Directory of the daemon's control socket.")
@click.option(
    "--timeout",
    type=Seconds(0.1, 3600),
    default=10.0,
    show_default=True,
    help="Seconds to wait for qgpud to start, and to answer.",
)
@click.version_option(qgpu.__version__)
@click.pass_context
def command(ctx: click.Context, runtime_dir: Path | None, timeout: float) -> None:
    """Share GPUs among pods: show and change what each pod gets."""
    ctx.obj = Context(runtime_dir or client_runtime_dir(), timeout)


entry_point.show_examples(command, examples.FIRST_STEPS)


def main() -> None:
    """Run ``qgpuctl`` and exit with its code."""
    _open_streams()
    entry_point.run("qgpuctl", command)


def _open_streams() -> None:
    """Open /dev/null for closed standard streams. Otherwise the next opened file would take their number.

    Characters that the locale lacks, such as bars and µ, are replaced.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            taken = os.open(os.devnull, os.O_RDWR)
            if taken != fd:
                os.dup2(taken, fd)
                os.close(taken)
            setattr(sys, name, os.fdopen(fd, "r" if fd == 0 else "w", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
