"""``qgpuctl gpu``: the pGPUs and how they are shared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from qgpu import units
from qgpu.changes import changed, who
from qgpu.cli import completion
from qgpu.cli.context import Context, pass_context
from qgpu.cli.output import memory, output_option, percentage, print_as, print_facts, print_json
from qgpu.cli.params import DURATION, FACTOR, PERCENT, PGPU
from qgpu.cli.pod import at_rest, follow
from qgpu.errors import InvalidValueError, QgpuError, RefusedError
from qgpu.ipc.control_socket import SCHEMA
from qgpu.policies.registry import POLICIES

HEADER = (
    *("GPU", "NAME", "MEMORY", "HELD", "POLICY", "ONLINE POLICY", "PERIOD", "OFFLINE FLOOR"),
    *("PODS", "ENGINE ACTIVE", "UTILIZATION", "PROBLEM"),
)
#: Columns that a narrow terminal does without, the first one first.
DROPPABLE = ("ONLINE POLICY", "OFFLINE FLOOR", "PERIOD", "ENGINE ACTIVE", "NAME", "UTILIZATION")


@click.group()
def gpu() -> None:
    """List pGPUs and set how they are shared."""


@gpu.command("list")
@output_option
@pass_context
def list_(context: Context, output: str) -> None:
    """List the pGPUs."""
    answer = context.ask("gpu.list")
    print_as(output, answer, HEADER, [row(gpu) for gpu in answer["gpus"]], DROPPABLE)


@gpu.command()
@click.argument("index", metavar="N", type=PGPU, shell_complete=completion.gpus)
@output_option
@pass_context
def show(context: Context, index: int, output: str) -> None:
    """Show everything known about one pGPU, and its pods."""
    found = context.gpu(index)
    if output == "json":
        print_json({"schema": SCHEMA, "gpu": found})
        return
    print_facts(list(facts(found, context.ask("pod.list")["pods"], context.ask("status"))))


def facts(gpu: dict[str, Any], pods: list[dict[str, Any]], status: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is known about a pGPU."""
    grants = [(pod["name"], grant) for pod in pods for grant in pod["grants"] if grant["gpu"] == gpu["index"]]
    below = [f"{name} ({reason})" for name, reason in gpu["below_quota"].items()]
    stuck = [f"{name} ({reason})" for name, reason in gpu["memory_stuck"].items()]
    outside = [each for each in status["unmanaged_processes"] if each["gpu"] == gpu["index"]]
    yield "pGPU", str(gpu["index"])
    yield "name", gpu["name"]
    yield "uuid", gpu["uuid"]
    yield "device", "simulated" if gpu["minor"] is None else f"/dev/nvidia{gpu['minor']}"
    if mig := gpu["mig"]:
        where = f"GPU {mig['card']}, GPU instance {mig['gpu_instance']}, compute instance {mig['compute_instance']}"
        yield "MIG instance", f"{where} (experimental)"
    yield "policy", gpu["policy"]
    yield "online policy", gpu["online_policy"]
    yield "temporary policy", gpu["temporary_policy"] or "-"
    yield "period", units.format_duration(gpu["period_ns"])
    yield "offline floor", units.format_percent(gpu["offline_floor"])
    yield "utilization", f"{percentage(gpu['utilization'])} of the time a kernel ran (NVML)"
    yield "engine active", f"{percentage(gpu['engine_active'])} of the last seconds a pod was on the engine"
    yield "memory", memory(gpu["memory"])
    yield "held by pods", memory(gpu["memory_used"])
    yield "limits granted", memory(sum(grant["memory"] or 0 for _, grant in grants))
    yield "memory overcommit", overcommit_text(gpu)
    yield "quotas granted", units.format_percent(sum(grant["cores"] or 0 for _, grant in grants))
    yield "pods", ", ".join(name for name, _ in grants) or "-"
    yield "below their quota", "; ".join(below) or "-"
    yield "cannot yield memory", "; ".join(stuck) or "-"
    yield "outside pods", ", ".join(f"{each['pid']} ({each['name']})" for each in outside) or "-"
    yield "problem", gpu["problem"] or "-"


@gpu.command()
@click.argument("index", metavar="N", type=PGPU, shell_complete=completion.gpus)
@click.option("--suspend", is_flag=True, help="Suspend pods that fit on no other pGPU.")
@pass_context
def drain(context: Context, index: int, suspend: bool) -> None:
    """Move all pods of pGPU N to others of its model. New pods may still come.

    Pods that you suspended stay: they hold no memory of the card.
    """
    here, left = context.gpu(index), []
    pods = context.ask("pod.list")["pods"]
    there = [pod for pod in pods if any(grant["gpu"] == index for grant in pod["grants"])]
    # those that wait for memory first: they would come back into what the others leave
    for pod in [pod["name"] for pod in sorted(there, key=lambda pod: not pod["yielded"])]:
        try:
            _clear(context, pod, index, _others(context, here), suspend=suspend)
        except QgpuError as error:
            left.append(str(error))
    if not there:
        click.echo(f"pGPU {index}: no pods")
    if left:
        raise RefusedError(
            f"pGPU {index}: {len(left)} {'pod stays' if len(left) == 1 else 'pods stay'}; {'; '.join(left)}"
        )


def _others(context: Context, here: dict[str, Any]) -> list[int]:
    """Return the other pGPUs of a pGPU's model, those with the fewest pods first."""
    alike = [
        (gpu["pods"], gpu["index"])
        for gpu in context.ask("gpu.list")["gpus"]
        if gpu["index"] != here["index"] and (gpu["name"], gpu["memory"]) == (here["name"], here["memory"])
    ]
    return [index for _, index in sorted(alike)]


def _clear(context: Context, name: str, index: int, others: Sequence[int], *, suspend: bool) -> None:
    """Move a pod to the first of the other pGPUs that takes it, or suspend it. Raises the last reason against.

    What was suspended by hand stays so, and a move would resume it. A pod that has not begun has nothing to move.
    """
    found = at_rest(context, name)
    if found["state"] == "suspended" and not found["yielded"]:
        click.echo(f"pod {name} stays on pGPU {index}: it was suspended by hand, so its memory is off the card")
        return
    if found["waits_for"] and not found["yielded"]:
        click.echo(f"pod {name} stays on pGPU {index}: it has not begun, and begins once there is memory for it")
        return
    refused: QgpuError = RefusedError(f"pod {name}: there is no other pGPU of this model")
    for other in others:
        try:
            _move(context, name, index, other)
            follow(context, name, "running", moved=True)
        except QgpuError as error:
            refused = error
        else:
            return
    if not suspend:
        raise refused
    context.ask("pod.suspend", name=name)
    follow(context, name, "suspended")


def _move(context: Context, name: str, index: int, other: int) -> None:
    """Begin to move a pod; once more if that is refused: it may have set out by itself just before."""
    wanted = {"name": name, "gpu": other, "from": index}
    try:
        context.ask("pod.move", **wanted)
    except RefusedError:
        at_rest(context, name)
        context.ask("pod.move", **wanted)


@gpu.group()
def policy() -> None:
    """Set policies."""


_NUMBERED = ", ".join(f"{name} ({info.number})" for name, info in POLICIES.items())


@policy.command("set", help=f"Set how pGPU N is shared.\n\nPolicies: {_NUMBERED}.")
@click.argument("index", metavar="N", type=PGPU, shell_complete=completion.gpus)
@click.argument("policy_name", metavar="[POLICY]", required=False, shell_complete=completion.policies)
@click.option("--online-policy", shell_complete=completion.policies, help="Policy among online pods.")
@click.option("--period", type=DURATION, help="Scheduling period, 10ms to 10s.")
@click.option(
    "--offline-floor", "floor", type=PERCENT, help="Part for offline pods that online work cannot take, such as 10%."
)
@click.option(
    "--memory-overcommit",
    "overcommit",
    type=FACTOR,
    help="How many times its memory may be granted, such as 2.0; 1: no overcommit.",
)
@pass_context
def set_(
    context: Context,
    index: int,
    policy_name: str | None,
    online_policy: str | None,
    period: int | None,
    floor: int | None,
    overcommit: float | None,
) -> None:
    """Change the given settings of a pGPU."""
    changes = {
        "policy": policy_name,
        "online_policy": online_policy,
        "period_ns": period,
        "offline_floor": floor,
        "memory_overcommit": overcommit,
    }
    if all(value is None for value in changes.values()):
        raise InvalidValueError(
            "gpu policy set: nothing to set; give POLICY, --online-policy, --period, --offline-floor or "
            "--memory-overcommit"
        )
    answer = context.ask("gpu.set", gpu=index, **changes)
    kept = "" if answer["kept"] else "; until qgpud ends, because it has no --state-dir"
    click.echo(f"pGPU {index}: {changed(answer['old'], answer['new'])}; by {who(answer['by'])}{kept}")


def overcommit_text(gpu: dict[str, Any]) -> str:
    """Describe how often memory may be granted, and what of it is off the card or missing now."""
    parts = ["-" if gpu["memory_overcommit"] == 1 else units.format_factor(gpu["memory_overcommit"])]
    if gpu["memory_yielded"]:
        parts.append(f"{memory(gpu['memory_yielded'])} of pods that take turns in host memory")
    if gpu["memory_shortage"]:
        parts.append(f"{memory(gpu['memory_shortage'])} being made free")
    return ", ".join(parts)


def row(gpu: dict[str, Any]) -> tuple[str, ...]:
    """Return a pGPU's cells under HEADER."""
    return (
        str(gpu["index"]),
        gpu["name"],
        memory(gpu["memory"]),
        memory(gpu["memory_used"]),
        gpu["policy"],
        gpu["online_policy"],
        units.format_duration(gpu["period_ns"]),
        units.format_percent(gpu["offline_floor"]) if gpu["offline_floor"] else "-",
        str(gpu["pods"]),
        percentage(gpu["engine_active"]),
        percentage(gpu["utilization"]),
        gpu["problem"] or "-",
    )
