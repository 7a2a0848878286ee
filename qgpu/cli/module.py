"""``qgpuctl module``: the kernel module's state and its on/off switch. Neither needs a daemon."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from qgpu.cli.context import Context, pass_context
from qgpu.cli.output import output_option, print_as
from qgpu.errors import NoGpuError, PermissionDeniedError, QgpuError
from qgpu.ipc.control_socket import SCHEMA, Client
from qgpu.planes.kmod.device import Device, missing_for_limits, problem_of, stalled_of, text_of
from qgpu.planes.kmod.uapi import NUMBERS

_SWITCH = Path("/sys/module/qgpu/parameters/enforce")


@click.group()
def module() -> None:
    """Show the kernel module, and switch it off and on."""


@module.command()
@output_option
def show(output: str) -> None:
    """Show whether it enforces, on which driver, and which pods it knows."""
    found = _state()
    rows = [(name.replace("_", " "), _shown(value)) for name, value in found.items()]
    print_as(output, {"schema": SCHEMA, **found}, ("", "MODULE"), rows)


@module.command()
@pass_context
def off(context: Context) -> None:
    """Stop enforcing. Every gate opens, and nothing is refused or counted until it is switched on again."""
    _switch("0")
    _record(context, on=False)


@module.command()
@pass_context
def on(context: Context) -> None:
    """Enforce again. Memory and channels that programs allocated meanwhile stay outside their pods' grants."""
    _switch("1")
    _record(context, on=True)


def _record(context: Context, *, on: bool) -> None:
    """Have the daemon record who switched it, if one runs: the switch itself needs none."""
    with suppress(QgpuError), Client(context.runtime_dir, context.timeout_s) as client:
        client.call("module.switched", on=on)


def _shown(value: object) -> str:
    return ", ".join(value) or "none" if isinstance(value, list) else str(value)


def _state() -> dict[str, Any]:
    device = Device()
    try:
        info = device.info()
        stalled = stalled_of(device, info)
    finally:
        device.close()
    return {
        "enforcing": problem_of(info) or "yes",
        "driver": text_of(info.driver) or "none",
        "abi": int(info.abi),
        "stalled_cards": stalled,
        "calls_sealed": bool(info.flags & NUMBERS["QGPU_INFO_SEALED"]),
        "managed_memory_bounded": bool(info.flags & NUMBERS["QGPU_INFO_MANAGED"]),
        "limits_refused": missing_for_limits(info) or "no",
        "pods": int(info.nr_pods),
        "clients": int(info.nr_clients),
        "objects": int(info.nr_objects),
    }


def _switch(value: str) -> None:
    try:
        _SWITCH.write_text(value)
    except FileNotFoundError as error:
        raise NoGpuError(f"{_SWITCH}: not there; is qgpu.ko loaded?") from error
    except OSError as error:
        raise PermissionDeniedError(f"{_SWITCH}: {error.strerror}; only root can switch the module") from error
