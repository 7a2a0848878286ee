"""``qgpuctl pod``: the pods, their grants and their use."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import click

from qgpu import units
from qgpu.changes import who
from qgpu.cli import completion
from qgpu.cli.context import Context, pass_context
from qgpu.cli.grant_options import change, given, grant_options
from qgpu.cli.output import (
    cores,
    duration,
    memory,
    output_option,
    percentage,
    print_as,
    print_facts,
    print_json,
    timestamp,
)
from qgpu.cli.params import DURATION, PGPU
from qgpu.errors import InvalidValueError, RefusedError
from qgpu.ipc.control_socket import SCHEMA
from qgpu.model import NS_PER_S

_HEADER = (
    "POD",
    "GPU",
    "CLASS",
    "TARGET",
    "QUOTA",
    "LIMIT",
    "USED",
    "HELD",
    "BUSY",
    "STATE",
    "PIDS",
    "CLAIM",
    "PROBLEM",
)

#: Columns that a narrow terminal does without, the first one first.
_DROPPABLE = ("PIDS", "BUSY", "USED", "TARGET", "CLAIM", "CLASS", "LIMIT")

#: What pods get, beside what they were promised: the header of ``use_rows``.
USE_HEADER = ("POD", "GPU", "QUOTA", "SHARE", "GATED", "GATE TIME", "SWITCHES", "SWITCH TIME", "LIMIT", "HELD")
USE_DROPPABLE = ("SWITCHES", "SWITCH TIME", "GATE TIME", "LIMIT")

#: How often a pod that is on the way is looked at.
_POLL_S = 0.1


@click.group()
def pod() -> None:
    """List pods, change their grants, suspend and resume them."""


@pod.command("list")
@output_option
@pass_context
def list_(context: Context, output: str) -> None:
    """List the pods."""
    answer = context.ask("pod.list")
    print_as(output, answer, _HEADER, [row for pod in answer["pods"] for row in _rows(pod)], _DROPPABLE)


@pod.command()
@click.argument("name", shell_complete=completion.pods)
@output_option
@pass_context
def show(context: Context, name: str, output: str) -> None:
    """Show everything known about one pod."""
    found = context.pod(name)
    if output == "json":
        print_json({"schema": SCHEMA, "pod": found})
        return
    print_facts(list(_facts(found)))
    for grant, usage in zip(found["grants"], found["usage"], strict=True):
        click.echo(f"pGPU {grant['gpu']}")
        print_facts(list(_on_gpu(grant, usage)), indent="  ")


@pod.command("set")
@click.argument("name", shell_complete=completion.pods)
@click.option("--gpu", type=PGPU, shell_complete=completion.gpus, help="Change only the grant on this pGPU.")
@grant_options
@pass_context
def set_(context: Context, /, name: str, gpu: int | None, **options: Any) -> None:
    """Change the grants of a running pod."""
    changes = given(options)
    if not changes:
        raise InvalidValueError(
            "pod set: nothing to set; give --cores, --class, --memory, --latency-target, --allow-profiling "
            "or --allow-graphics"
        )
    change(context, "pod", name, gpu, changes)


_NO_WAIT = click.option("--no-wait", is_flag=True, help="Return when it has begun.")


@pod.command()
@click.argument("name", shell_complete=completion.pods)
@click.option("--work", type=DURATION, help="How long its running work may take to end.  [default: 10s]")
@_NO_WAIT
@pass_context
def suspend(context: Context, name: str, work: int | None, no_wait: bool) -> None:
    """Take a pod off its GPUs into host memory. Its processes wait in their CUDA calls until it is resumed."""
    context.ask("pod.suspend", name=name, work_ns=work)
    if not no_wait:
        follow(context, name, "suspended")


@pod.command()
@click.argument("name", shell_complete=completion.pods)
@_NO_WAIT
@pass_context
def resume(context: Context, name: str, no_wait: bool) -> None:
    """Put a suspended pod back on its GPUs, where it goes on."""
    waits = context.ask("pod.resume", name=name)["waits"]
    if waits and context.pod(name)["state"] == "suspended":
        click.echo(f"pod {name} waits for {waits}, and comes back by itself")
    elif not no_wait:
        follow(context, name, "running")


@pod.command()
@click.argument("name", shell_complete=completion.pods)
@click.option(
    "--gpu",
    "target",
    type=PGPU,
    required=True,
    shell_complete=completion.gpus,
    help="The pGPU that it moves to, of the same model.",
)
@click.option(
    "--from",
    "source",
    type=PGPU,
    shell_complete=completion.gpus,
    help="The pGPU that it leaves.  [default: its only one]",
)
@_NO_WAIT
@pass_context
def move(context: Context, name: str, target: int, source: int | None, no_wait: bool) -> None:
    """Move a pod to another GPU of this host, with its grant. A suspended pod runs there."""
    context.ask("pod.move", **{"name": name, "gpu": target, "from": source})
    if not no_wait:
        follow(context, name, "running", moved=True)


def follow(context: Context, name: str, wanted: str, *, moved: bool = False) -> None:
    """Wait until a pod is where it should be, and say how long that took. Raises RefusedError if it is not.

    With ``moved`` it should also be on another card.
    """
    began_s, found = time.monotonic(), at_rest(context, name)
    if found["state"] != wanted or (moved and found["state_error"]):
        why = found["state_error"] or "it was told otherwise meanwhile"
        raise RefusedError(f"pod {name}: {found['state']}: {why}")
    size = units.format_memory(sum(found["suspended_memory"].values()))
    of = f", {size} in host memory" if wanted == "suspended" else ""
    at = f" on pGPU {', '.join(str(grant['gpu']) for grant in found['grants'])}" if moved else ""
    click.echo(f"pod {name} {wanted}{at} after {time.monotonic() - began_s:.1f} s{of}")


def at_rest(context: Context, name: str) -> dict[str, Any]:
    """Return a pod as soon as it is not on its way."""
    while (found := context.pod(name))["moving"] or found["state"] not in ("running", "suspended"):
        time.sleep(_POLL_S)
    return found


def _facts(pod: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is known about a pod as a whole."""
    yield "pod", pod["name"]
    yield "state", "; ".join(filter(None, [_state(pod), pod["state_error"]]))
    yield "in that state since", timestamp(pod["state_since_s"])
    yield "in host memory", memory(sum(pod["suspended_memory"].values()) if pod["suspended_memory"] else None)
    yield "started", f"{pod['created_at']}, by {who(pod['created_by'])}" if pod["created_at"] else "-"
    yield "pids", ", ".join(map(str, pod["pids"])) or "-"
    yield "cgroup", pod["cgroup"] or "-"
    for key, name in (("namespace", "namespace"), ("pod", "Kubernetes pod"), ("container", "container")):
        if pod[key]:
            yield name, pod[key]
    yield "claim", pod["claim"] or "-"
    for key, name in (("refused_memory", "refused allocations"), ("refused_calls", "refused calls")):
        yield name, "not counted here" if pod[key] is None else str(pod[key])
    yield "problem", pod["problem"] or "-"


def _state(pod: dict[str, Any]) -> str:
    """Return where a pod is, and what it waits for."""
    if not pod["waits_for"]:
        return str(pod["state"])
    return f"{pod['state'] if pod['yielded'] else 'not begun'}, waits for {pod['waits_for']}"


def _on_gpu(grant: dict[str, Any], usage: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is known about a pod on one pGPU."""
    yield "class", grant["class"]
    yield "quota", cores(grant["cores"])
    yield "share, last seconds", percentage(usage["share"])
    yield "below its quota", usage["below_quota_reason"] or "no"
    yield "latency target", duration(grant["latency_target_ns"])
    wait_ns = usage["expected_wait_p99_ns"]
    yield "expected p99", "-" if wait_ns is None else f"+ {duration(wait_ns)}"
    yield "limit", memory(grant["memory"])
    yield "profiling", "allowed" if grant["profiling"] else "refused"
    yield "graphics", "allowed" if grant["graphics"] else "refused"
    yield "held", memory(usage["memory"])
    yield "busy", "yes" if usage["busy"] else "no"
    yield "TSGs", str(usage["tsgs"])
    yield "GPU time", f"{usage['used_ns'] / NS_PER_S:.3f} s"
    yield "gate closed", f"{usage['gate_time_ns'] / NS_PER_S:.3f} s, {percentage(usage['gated'])} of the last seconds"
    yield "switched in", f"{units.format_count(usage['switches'])}, about {duration(usage['switch_time_ns'])} in all"
    yield "debt", duration(usage["debt_ns"])


def use_rows(pod: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return what a pod gets on each pGPU: parts of the last seconds, times since the daemon knows it."""
    return [
        (
            pod["name"],
            str(grant["gpu"]),
            cores(grant["cores"]),
            percentage(used["share"]),
            percentage(used["gated"]),
            f"{used['gate_time_ns'] / NS_PER_S:.2f} s",
            str(used["switches"]),
            duration(used["switch_time_ns"]),
            memory(grant["memory"]),
            memory(used["memory"]),
        )
        for grant, used in zip(pod["grants"], pod["usage"], strict=True)
    ]


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
            "waiting" if pod["waits_for"] else pod["state"],
            str(len(pod["pids"])),
            pod["claim"] or "-",
            "; ".join(filter(None, [pod["problem"], pod["state_error"]])) or "-",
        )
        for grant, used in zip(pod["grants"], pod["usage"], strict=True)
    ]
