"""``qgpuctl doctor``: what this host needs for sharing GPUs, and whether shares are enforced now."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import click

from qgpu.cli import completion
from qgpu.cli.context import Context, first_gpu, pass_context
from qgpu.cli.output import output_option, print_json, print_table
from qgpu.cli.params import FIRST_PGPU, PGPU
from qgpu.doctor.report import Check, failed
from qgpu.errors import DaemonUnreachableError, ExitCode
from qgpu.ipc.control_socket import SCHEMA, Client


@click.command()
@click.option(
    "--self-test", is_flag=True, help="Run two short pods and measure what they get (about 5 s). No setting changes."
)
@click.option(
    "--gpu", type=PGPU, show_default=FIRST_PGPU, shell_complete=completion.gpus, help="The pGPU of the self-test."
)
@output_option
@pass_context
def doctor(context: Context, self_test: bool, gpu: int | None, output: str) -> None:
    """Check what qgpu needs. Exit code 3: something is missing; 22: shares are not enforced."""
    from qgpu.doctor.containers import check_containers
    from qgpu.doctor.daemon import check_daemon
    from qgpu.doctor.device_files import check_device_files
    from qgpu.doctor.gpu import check_gpu, driver_loaded
    from qgpu.doctor.selftest import self_test as run_self_test
    from qgpu.doctor.system import check_system

    checks = [
        *check_system(needed=driver_loaded()),
        *check_gpu(),
        *check_daemon(context.runtime_dir, context.timeout_s),
        *([check_containers(), check_device_files()] if driver_loaded() else []),
    ]
    say = partial(click.echo, err=True)
    measured = []
    if self_test:
        gpu = _first_gpu(context) if gpu is None else gpu
        measured = run_self_test(context.runtime_dir, gpu, context.timeout_s, say)
    _print([*checks, *measured], output)
    if failed(measured):
        sys.exit(ExitCode.DRIFT)
    if failed(checks):
        sys.exit(ExitCode.NOT_SUPPORTED)


def _first_gpu(context: Context) -> int:
    try:
        with Client(context.runtime_dir, context.timeout_s) as client:
            return first_gpu(client)
    except DaemonUnreachableError:  # the self-test starts a qgpud of its own
        return 0


def _print(checks: Sequence[Check], output: str) -> None:
    if output == "json":
        print_json({"schema": SCHEMA, "checks": [asdict(check) for check in checks]})
        return
    print_table(("", "CHECK", "FOUND"), [(check.verdict.value, check.name, check.found) for check in checks])
    for check in checks:
        if check.remedy:
            click.echo(f"{check.verdict.value}: {check.name}: {check.remedy}")
