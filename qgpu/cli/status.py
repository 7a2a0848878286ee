"""``qgpuctl status``: what the daemon runs on, its pGPUs, its pods, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from qgpu.cli.context import Context, pass_context
from qgpu.cli.gpu import DROPPABLE, HEADER, overcommit_text, row
from qgpu.cli.output import output_option, print_json, print_table
from qgpu.cli.pod import USE_DROPPABLE, USE_HEADER, use_rows


@click.command()
@output_option
@pass_context
def status(context: Context, output: str) -> None:
    """Show what the daemon runs on, how its pGPUs are shared, and what pods get."""
    answer = context.ask("status") | {"pods": context.ask("pod.list")["pods"]}
    if output == "json":
        print_json(answer)
        return
    driver = answer["driver"] or "none"
    click.echo(f"plane {answer['plane']} ({answer['why']}), qgpu {answer['version']}, driver {driver}")
    click.echo(f"up {answer['uptime_s']:.0f} s")
    for line in warnings(answer):
        click.echo(line)
    print_table(HEADER, [row(gpu) for gpu in answer["gpus"]], DROPPABLE)
    if answer["pods"]:
        click.echo()
        print_table(USE_HEADER, [used for pod in answer["pods"] for used in use_rows(pod)], USE_DROPPABLE)


def warnings(answer: dict[str, Any]) -> Iterator[str]:
    """Yield lines about device files, pods below their quota, excluded cards, and processes outside pods."""
    files = answer["device_files"]
    if files["enforced"]:
        refused = sum(files["refused"].values())
        yield f"device files: isolated, {refused} uses from outside refused"
    elif answer["plane"] != "sim":
        yield f"device files: NOT isolated: {files['why']}"
    for gpu in answer.get("gpus", ()):
        for name, reason in gpu["below_quota"].items():
            yield f"below its quota: pod {name} on pGPU {gpu['index']}: {reason}"
        if gpu["memory_yielded"] or gpu["memory_shortage"]:
            yield f"memory of pGPU {gpu['index']}: overcommit {overcommit_text(gpu)}"
    if instances := ", ".join(str(gpu["index"]) for gpu in answer.get("gpus", ()) if gpu["mig"]):
        yield f"MIG instances: pGPUs {instances}; experimental, tried on no card in MIG mode"
    for card in answer["excluded_cards"]:
        yield f"GPU {card['gpu']} ({card['pci']}) excluded: {card['why']}"
    for each in answer["unmanaged_processes"]:
        yield f"outside pods: process {each['pid']} ({each['name']}) on pGPU {each['gpu']}, cgroup {each['cgroup']}"
