"""``qgpuctl group``: pods that trust each other, side by side under one grant."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import asdict
from typing import Any

import click

from qgpu.changes import changed, who
from qgpu.cli import completion
from qgpu.cli.context import Context, first_gpu, pass_context
from qgpu.cli.grant_options import change, class_option, given, grant_options, or_none, permission_options, permissions
from qgpu.cli.output import cores, duration, memory, output_option, print_as, print_facts, print_json, print_table
from qgpu.cli.params import DURATION, FIRST_PGPU, MEMORY, PGPU, OrNone
from qgpu.errors import InvalidValueError, PermissionDeniedError, QgpuError, TimedOutError
from qgpu.groups import group_cdi, keeper_process
from qgpu.groups.group_files import GroupFiles, check_not_claims, names
from qgpu.groups.keeper import Keeper, members_left
from qgpu.groups.mps_server import members
from qgpu.groups.supervisor import Supervisor
from qgpu.ipc.control_socket import SCHEMA
from qgpu.linux import cgroup, proc
from qgpu.linux.shutdown import Shutdown
from qgpu.model.member_limits import MemberLimits

_HEADER = ("GROUP", "GPU", "CLASS", "QUOTA", "LIMIT", "HELD", "MEMBERS", "PROBLEM")
_POLL_S = 0.05
#: The keeper ends MPS in this time; it kills what does not end.
_END_S = 30.0


@click.group()
def group() -> None:
    """Run pods that trust each other side by side under one grant."""


@group.command()
@click.argument("name")
@click.option("--gpu", type=PGPU, show_default=FIRST_PGPU, shell_complete=completion.gpus, help="The pGPU to run on.")
@click.option("--cores", "quota", type=int, help="Quota of the whole group in per cent of the pGPU.")
@click.option("--memory", "limit", type=MEMORY, help="Memory limit of the whole group, such as 40GiB.")
@class_option
@click.option("--latency-target", "target", type=DURATION, help="What sharing may add to its p99, such as 2ms.")
@permission_options
@click.option("--sm", type=int, help="A member's part of the SMs in per cent, unless it asks for another.")
@click.option("--member-memory", type=MEMORY, help="A member's memory limit, unless it asks for another.")
@pass_context
def create(
    context: Context,
    name: str,
    gpu: int | None,
    quota: int | None,
    limit: int | None,
    pod_class: str,
    target: int | None,
    profiling: bool,
    graphics: bool,
    sm: int | None,
    member_memory: int | None,
) -> None:
    """Make a group with its own MPS server. Members start with 'qgpuctl run --group NAME'."""
    if gpu is None:
        with context.connect() as client:
            gpu = first_gpu(client)
    context.gpu(gpu)
    GroupFiles(context.runtime_dir, name).server.environment(sm, member_memory)  # a part that is none is refused
    part = MemberLimits(sm, member_memory)
    grant = {"class": pod_class, "cores": quota, "memory": limit, "latency_target_ns": target}
    grant |= permissions(profiling=profiling, graphics=graphics)
    keeper_process.start(context.runtime_dir, name, {str(gpu): grant}, part)
    click.echo(f"group {name}: made on pGPU {gpu}")


@group.command()
@pass_context
def serve(context: Context) -> None:
    """Make the groups that Kubernetes claims ask for. Runs until a signal; the groups outlive it."""
    stop = Shutdown(signal.SIGTERM, signal.SIGINT)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Supervisor(context.runtime_dir).run(stop)


@group.command("list")
@output_option
@pass_context
def list_(context: Context, output: str) -> None:
    """List the groups."""
    pods = {pod["name"]: pod for pod in context.ask("pod.list")["pods"]}
    known = [pods[name] for name in names(context.runtime_dir) if name in pods]
    found = [pod | {"members": members(pod["pids"])} for pod in known]
    rows = [
        (
            *(each["name"], str(grant["gpu"]), grant["class"], cores(grant["cores"]), memory(grant["memory"])),
            *(memory(use["memory"]), str(len(each["members"])), each["problem"] or "-"),
        )
        for each in found
        for grant, use in zip(each["grants"], each["usage"], strict=True)
    ]
    print_as(output, {"schema": SCHEMA, "groups": found}, _HEADER, rows)


@group.command()
@click.argument("name", shell_complete=completion.groups)
@output_option
@pass_context
def show(context: Context, name: str, output: str) -> None:
    """Show a group and its members."""
    files = GroupFiles(context.runtime_dir, name)
    files.need_keeper()
    pod, part = context.pod(name), files.part
    found = [(pid, proc.name(pid), _cgroup(pid)) for pid in members(pod["pids"])]
    if output == "json":
        inside = [dict(zip(("pid", "program", "cgroup"), each, strict=True)) for each in found]
        print_json({"schema": SCHEMA, "group": pod | {"members": inside, "part": asdict(part)}})
        return
    (grant,), (usage,) = pod["grants"], pod["usage"]
    print_facts(
        [
            ("group", f"{name} on pGPU {grant['gpu']}, {grant['class']}"),
            ("quota", cores(grant["cores"])),
            ("limit", f"{memory(grant['memory'])}, {memory(usage['memory'])} used"),
            ("latency target", duration(grant["latency_target_ns"])),
            ("member's SMs", cores(part.sm)),
            ("member's limit", memory(part.memory)),
            ("problem", pod["problem"] or "-"),
        ]
    )
    print_table(("MEMBER", "PROGRAM", "CGROUP"), [(str(pid), program, at) for pid, program, at in found])


@group.command("set")
@click.argument("name", shell_complete=completion.groups)
@grant_options
@click.option("--sm", type=OrNone(click.INT), help="SMs of members that start from now on, in per cent, or none.")
@click.option("--member-memory", type=OrNone(MEMORY), help="Memory limit of members that start from now on, or none.")
@pass_context
def set_(context: Context, /, name: str, sm: Any, member_memory: Any, **options: Any) -> None:
    """Change a group's grant for all members, or defaults of later ones."""
    files = GroupFiles(context.runtime_dir, name)
    files.need_keeper()
    check_not_claims(context.ask("grant.list")["grants"], name, "it has what its claim holds; make another claim")
    changes, before = given(options), files.part
    part = MemberLimits(
        before.sm if sm is None else or_none(sm), before.memory if member_memory is None else or_none(member_memory)
    )
    if not changes and sm is None and member_memory is None:
        raise InvalidValueError(
            "group set: nothing to set; give --cores, --class, --memory, --latency-target, --sm or --member-memory"
        )
    files.server.environment(part.sm, part.memory)  # a part that is none is refused before anything changes
    if part != before:
        files.part = before  # only its owner can: others are refused before anything changes
    if changes:
        change(context, "group", name, None, changes)
    if sm is not None or member_memory is not None:
        _set_part(context, files, before, part)


def _set_part(context: Context, files: GroupFiles, before: MemberLimits, part: MemberLimits) -> None:
    """Change what later members get, and say what has changed; nothing is if it cannot be recorded."""
    with context.connect() as client:
        if part != before:
            files.part = part
        try:
            answer = client.call("group.changed", name=files.name, old=asdict(before), new=asdict(part))
        except QgpuError:
            files.part = before
            raise
        if part != before:
            group_cdi.offer(client, files)
    click.echo(f"group {files.name}: {changed(answer['old'], answer['new'])}; by {who(answer['by'])}")


@group.command()
@click.argument("name", shell_complete=completion.groups)
@click.option("--force", is_flag=True, help="Even if members run: they lose their GPU.")
@pass_context
def remove(context: Context, name: str, force: bool) -> None:
    """End a group's MPS server and give its grant back."""
    files = GroupFiles(context.runtime_dir, name)
    check_not_claims(context.ask("grant.list")["grants"], name, "it ends with its claim; delete its pods")
    if files.keeper() is None and files.directory.is_dir():  # it was killed
        Keeper(context.runtime_dir, name, {}).clear_away(force)
        return
    keeper = files.need_keeper()
    left = members(context.pod(name)["pids"])
    if left and not force:
        raise members_left(name, len(left))
    try:
        os.kill(keeper, signal.SIGTERM)
    except PermissionError:
        raise PermissionDeniedError(f"group {name}: another user made it; ask that user or root to remove it") from None
    until = time.monotonic() + _END_S
    while files.keeper() is not None:
        if time.monotonic() > until:
            raise TimedOutError(f"group {name}: its keeper (pid {keeper}) does not end; see {files.directory}/log")
        time.sleep(_POLL_S)


def _cgroup(pid: int) -> str:
    try:
        return proc.printable(os.fsencode(cgroup.of(pid)))
    except OSError:  # it has just ended
        return "-"
