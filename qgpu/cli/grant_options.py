"""The options of a grant, for pods and for groups, which are pods: of a new one, and those that change one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from qgpu.changes import changed, who
from qgpu.cli.context import Context
from qgpu.cli.params import DURATION, MEMORY, NONE, OrNone
from qgpu.model import PodClass

_F = TypeVar("_F", bound=Callable[..., Any])

#: The fields of a grant, by the argument of their option.
_FIELDS = {
    "quota": "cores",
    "pod_class": "class",
    "limit": "memory",
    "target": "latency_target_ns",
    "profiling": "profiling",
    "graphics": "graphics",
}
_GRAPHICS_HELP = "Let it draw by OpenGL or Vulkan; a long draw holds up the card's other pods."
_PROFILING_HELP = "Let profilers such as ncu read the counters of the whole card, its other pods included."
_CLASS = click.Choice([each.value for each in PodClass])


def class_option(function: _F) -> _F:
    """Give a command that makes a pod the option of its class, as its argument ``pod_class``."""
    return click.option(
        "--class",
        "pod_class",
        type=_CLASS,
        default=PodClass.OFFLINE.value,
        show_default=True,
        help="online: latency matters; offline: takes the time that is left.",
    )(function)


def permission_options(function: _F) -> _F:
    """Give a command that makes a pod the flags of what it may do besides, as ``profiling`` and ``graphics``."""
    for option in (
        click.option("--allow-graphics", "graphics", is_flag=True, help=_GRAPHICS_HELP),
        click.option("--allow-profiling", "profiling", is_flag=True, help=_PROFILING_HELP),
    ):
        function = option(function)
    return function


def permissions(*, profiling: bool, graphics: bool) -> dict[str, bool]:
    """Return the fields of a new grant that these flags ask for."""
    return {name: True for name, asked in (("profiling", profiling), ("graphics", graphics)) if asked}


def grant_options(function: _F) -> _F:
    """Give a command the options that change a grant as its arguments ``quota``, ``limit``, ``profiling`` and so on."""
    for option in (
        click.option("--allow-profiling/--refuse-profiling", "profiling", default=None, help=_PROFILING_HELP),
        click.option("--allow-graphics/--refuse-graphics", "graphics", default=None, help=_GRAPHICS_HELP),
        click.option(
            "--latency-target",
            "target",
            type=OrNone(DURATION),
            help="What sharing may add to its p99, such as 2ms, or none.",
        ),
        click.option(
            "--memory",
            "limit",
            type=OrNone(MEMORY),
            help="Memory limit such as 16GiB (16G and 16GB are the same), or none.",
        ),
        click.option("--class", "pod_class", type=_CLASS, help="Its class."),
        click.option("--cores", "quota", type=OrNone(click.INT), help="Quota in per cent of the pGPU, or none."),
    ):
        function = option(function)
    return function


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes that these arguments ask for; None in place of ``none``."""
    return {_FIELDS[key]: or_none(value) for key, value in options.items() if value is not None}


def or_none(value: Any) -> Any:
    """Return what an option of type OrNone stands for."""
    return None if value == NONE else value


def change(context: Context, kind: str, name: str, gpu: int | None, changes: Mapping[str, Any]) -> None:
    """Change a pod's grants, and say what has changed. Raises a QgpuError."""
    answer = context.ask("pod.set", name=name, gpu=gpu, **changes)
    click.echo(f"{kind} {name}: {changed(answer['old'], answer['new'])}; by {who(answer['by'])}")
    for note in answer["notes"]:
        click.echo(f"{kind} {name} {note}", err=True)
