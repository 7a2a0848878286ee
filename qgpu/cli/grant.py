"""``qgpuctl grant``: what Kubernetes claims hold, whether or not a container uses it."""

from __future__ import annotations

from typing import Any

import click

from qgpu.cli import completion
from qgpu.cli.context import Context, pass_context
from qgpu.cli.output import cores, duration, memory, output_option, print_as
from qgpu.errors import UnknownNameError

_HEADER = ("CLAIM", "UID", "REQUEST", "GPU", "CLASS", "TARGET", "QUOTA", "LIMIT", "PODS")


@click.group()
def grant() -> None:
    """List and drop what Kubernetes claims hold."""


@grant.command("list")
@output_option
@pass_context
def list_(context: Context, output: str) -> None:
    """List the prepared grants."""
    answer = context.ask("grant.list")
    print_as(output, answer, _HEADER, [row for each in answer["grants"] for row in _rows(each)])


@grant.command()
@click.argument("uid", shell_complete=completion.claims)
@pass_context
def drop(context: Context, uid: str) -> None:
    """Drop the prepared grant of the claim with this UID. No pod of it may be left."""
    if uid not in (each["uid"] for each in context.ask("grant.list")["grants"]):
        raise UnknownNameError(f"claim {uid}: it holds nothing; see: qgpuctl grant list")
    context.ask("grant.drop", uid=uid)
    click.echo(f"claim {uid}: dropped")


def _rows(each: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            f"{each['namespace']}/{each['name']}",
            each["uid"],
            device["request"],
            device["gpu"],
            device["class"],
            duration(device["latency_target_ns"]),
            cores(device["cores"]),
            memory(device["memory"]),
            ", ".join(each["pods"]) or "-",
        )
        for device in each["devices"]
    ]
