"""``qgpuctl pod``: the pods, their grants and their use."""

from __future__ import annotations

from typing import Any

import click

from qgpu.cli.context import Context, pass_context
from qgpu.cli.output import cores, duration, memory, output_option, print_as
from qgpu.cli.params import DURATION, MEMORY, NONE, OrNone
from qgpu.errors import InvalidValueError
from qgpu.ipc.control_socket import SCHEMA
from qgpu.model import PodClass

_HEADER = ("POD", "GPU", "CLASS", "TARGET", "CORES", "MEMORY", "USED", "HELD", "BUSY", "PIDS", "CLAIM", "TROUBLE")


@click.group()
def pod() -> None:
    """List pods and change their grants."""


@pod.command("list")
@output_option
@pass_context
def list_(context: Context, output: str) -> None:
    """List the pods."""
    answer = context.ask("pod.list")
    print_as(output, answer, _HEADER, [row for pod in answer["pods"] for row in _rows(pod)])


@pod.command()
@click.argument("name")
@output_option
@pass_context
def show(context: Context, name: str, output: str) -> None:
    """Show one pod."""
    found = context.pod(name)
    print_as(output, {"schema": SCHEMA, "pod": found}, _HEADER, _rows(found))


@pod.command("set")
@click.argument("name")
@click.option("--gpu", type=int, help="Change only the grant on this pGPU.")
@click.option("--cores", "quota", type=OrNone(click.INT), help="Quota in per cent of the pGPU, or none.")
@click.option("--class", "pod_class", type=click.Choice([each.value for each in PodClass]), help="The pod's class.")
@click.option("--memory", "limit", type=OrNone(MEMORY), help="Memory limit such as 16GiB, or none.")
@click.option(
    "--latency-target", "target", type=OrNone(DURATION), help="What sharing may add to its p99, such as 2ms, or none."
)
@pass_context
def set_(
    context: Context, name: str, gpu: int | None, quota: Any, pod_class: str | None, limit: Any, target: Any
) -> None:
    """Change the grants of a running pod."""
    changes = {
        key: None if value == NONE else value
        for key, value in (
            ("cores", quota),
            ("class", pod_class),
            ("memory", limit),
            ("latency_target_ns", target),
        )
        if value is not None
    }
    if not changes:
        raise InvalidValueError("pod set: nothing to set; give --cores, --class, --memory or --latency-target")
    for note in context.ask("pod.set", name=name, gpu=gpu, **changes)["notes"]:
        click.echo(f"pod {name} {note}", err=True)


def _rows(pod: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            pod["name"],
            str(grant["gpu"]),
            grant["class"],
            duration(grant["latency_target_ns"]),
            cores(grant["cores"]),
            memory(grant["memory"]),
            f"{used['used_ns'] / 1e9:.2f} s",
            memory(used["memory"]),
            "yes" if used["busy"] else "no",
            str(len(pod["pids"])),
            pod["claim"] or "-",
            pod["trouble"] or "-",
        )
        for grant, used in zip(pod["grants"], pod["usage"], strict=True)
    ]
