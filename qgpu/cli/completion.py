"""``qgpuctl completion``, and what completes its values: pods, pGPUs, policies … A silent daemon completes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from qgpu.cli.context import in_order
from qgpu.errors import QgpuError
from qgpu.paths import client_runtime_dir

#: A person waits for this.
_TIMEOUT_S = 0.5
_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion of qgpuctl for a shell. The Debian package installs it by itself."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "qgpuctl", "_QGPUCTL_COMPLETE").source())


def pods(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a pod."""
    return [
        CompletionItem(pod["name"], help=", ".join(f"pGPU {grant['gpu']}" for grant in pod["grants"]))
        for pod in in_order(_ask(ctx, "pod.list").get("pods", ()))
        if pod["name"].startswith(incomplete)
    ]


def gpus(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the number of a pGPU, or its UUID once that is begun."""
    key = "uuid" if incomplete[:1].isalpha() else "index"
    return [
        CompletionItem(str(gpu[key]), help=gpu["name"])
        for gpu in _ask(ctx, "gpu.list").get("gpus", ())
        if str(gpu[key]).upper().startswith(incomplete.upper())
    ]


def groups(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a share group."""
    from qgpu.groups.group_files import names

    return [CompletionItem(name) for name in names(_directory(ctx)) if name.startswith(incomplete)]


def claims(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the UID of a Kubernetes claim."""
    return [
        CompletionItem(grant["uid"], help=f"{grant['namespace']}/{grant['name']}")
        for grant in _ask(ctx, "grant.list").get("grants", ())
        if grant["uid"].startswith(incomplete)
    ]


def policies(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a policy."""
    from qgpu.policies.registry import POLICIES

    return [
        CompletionItem(name, help=f"number {info.number}")
        for name, info in POLICIES.items()
        if name.startswith(incomplete)
    ]


def commands(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the words of a command."""
    return [CompletionItem(word) for word in _below(ctx) if word.startswith(incomplete)]


def _below(ctx: click.Context) -> Iterator[str]:
    here: Any = ctx.find_root().command
    for word in ctx.params.get("words") or ():
        here = here.get_command(ctx, word) if isinstance(here, click.Group) else None
    if isinstance(here, click.Group):
        yield from here.list_commands(ctx)


def _directory(ctx: click.Context) -> Path:
    found: Path | None = ctx.find_root().params.get("runtime_dir")
    return found or client_runtime_dir()


def _ask(ctx: click.Context, op: str) -> dict[str, Any]:
    """Ask the daemon once, without waiting for one."""
    from qgpu.ipc.control_socket import Client

    try:
        with Client(_directory(ctx), _TIMEOUT_S) as client:
            return client.call(op)
    except QgpuError:
        return {}
