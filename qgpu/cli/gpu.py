"""``qgpuctl status`` and ``qgpuctl gpu``: the pGPUs and how they are shared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from qgpu import units
from qgpu.cli.context import Context, pass_context
from qgpu.cli.output import memory, output_option, print_as, print_json, print_table
from qgpu.cli.params import DURATION, PERCENT
from qgpu.errors import InvalidValueError
from qgpu.ipc.control_socket import SCHEMA
from qgpu.policies.registry import POLICIES

_HEADER = ("GPU", "NAME", "MEMORY", "POLICY", "ONLINE POLICY", "PERIOD", "OFFLINE FLOOR", "PODS", "TROUBLE")


@click.command()
@output_option
@pass_context
def status(context: Context, output: str) -> None:
    """Show what the daemon runs on and how its pGPUs are shared."""
    answer = context.ask("status")
    if output == "json":
        print_json(answer)
        return
    driver = answer["driver"] or "none"
    click.echo(f"plane {answer['plane']} ({answer['why']}), qgpu {answer['version']}, driver {driver}")
    click.echo(f"up {answer['uptime_s']:.0f} s")
    for line in _beside(answer):
        click.echo(line)
    print_table(_HEADER, [_row(gpu) for gpu in answer["gpus"]])


def _beside(answer: dict[str, Any]) -> Iterator[str]:
    """Yield lines about the isolation of device files, and about processes on the cards outside pods."""
    files = answer["device_files"]
    if files["enforced"]:
        refused = sum(files["refused"].values())
        yield f"device files: isolated, {refused} uses from outside refused"
        if files["why"]:
            yield f"device files: {files['why']}"
    elif answer["plane"] != "sim":
        yield f"device files: NOT isolated: {files['why']}"
    for each in answer["unmanaged_processes"]:
        yield f"outside pods: process {each['pid']} ({each['name']}) on pGPU {each['gpu']}, cgroup {each['cgroup']}"


@click.group()
def gpu() -> None:
    """List pGPUs and set how they are shared."""


@gpu.command("list")
@output_option
@pass_context
def list_(context: Context, output: str) -> None:
    """List the pGPUs."""
    answer = context.ask("gpu.list")
    print_as(output, answer, _HEADER, [_row(gpu) for gpu in answer["gpus"]])


@gpu.command()
@click.argument("index", metavar="N", type=int)
@output_option
@pass_context
def show(context: Context, index: int, output: str) -> None:
    """Show one pGPU."""
    found = context.gpu(index)
    names = [name.lower() for name in _HEADER[1:]]
    rows = [("uuid", found["uuid"]), *zip(names, _row(found)[1:], strict=True)]
    print_as(output, {"schema": SCHEMA, "gpu": found}, ("GPU", str(index)), rows)


@gpu.group()
def policy() -> None:
    """Set policies."""


_NUMBERED = ", ".join(f"{name} ({info.number})" for name, info in POLICIES.items())


@policy.command("set", help=f"Set the policy of pGPU N: {_NUMBERED}.")
@click.argument("index", metavar="N", type=int)
@click.argument("policy_name", metavar="[POLICY]", required=False)
@click.option("--online-policy", help="Policy among online pods.")
@click.option("--period", type=DURATION, help="Scheduling period, 10ms to 10s.")
@click.option(
    "--offline-floor", "floor", type=PERCENT, help="Part for offline pods that online work cannot take, such as 10%."
)
@pass_context
def set_(
    context: Context,
    index: int,
    policy_name: str | None,
    online_policy: str | None,
    period: int | None,
    floor: int | None,
) -> None:
    """Change the given settings of a pGPU."""
    changes = {"policy": policy_name, "online_policy": online_policy, "period_ns": period, "offline_floor": floor}
    if all(value is None for value in changes.values()):
        raise InvalidValueError(
            "gpu policy set: nothing to set; give POLICY, --online-policy, --period or --offline-floor"
        )
    context.ask("gpu.set", gpu=index, **changes)


def _row(gpu: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(gpu["index"]),
        gpu["name"],
        memory(gpu["memory"]),
        gpu["policy"],
        gpu["online_policy"],
        units.format_duration(gpu["period_ns"]),
        f"{gpu['offline_floor']} %" if gpu["offline_floor"] else "-",
        str(gpu["pods"]),
        gpu["trouble"] or "-",
    )
