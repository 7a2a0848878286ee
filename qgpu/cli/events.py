"""``qgpuctl events``: who changed which policy or grant, and when."""

from __future__ import annotations

from typing import Any

import click

from qgpu.changes import changed, granted, who
from qgpu.cli.context import Context, pass_context
from qgpu.cli.output import output_option, print_as
from qgpu.entry_point import IntRange

_HEADER = ("WHEN", "WHO", "WHAT", "ON", "CHANGE")
#: Columns that a narrow terminal does without.
_DROPPABLE = ("WHO",)


@click.command()
@click.option("-n", "--count", type=IntRange(1, 1000), default=50, show_default=True, help="How many at most.")
@click.option("--settings", is_flag=True, help="Only changes of policies and grants, not pods that come and go.")
@output_option
@pass_context
def events(context: Context, count: int, settings: bool, output: str) -> None:
    """Show the last changes of policies, grants and pods, with who made them.

    The daemon keeps at least the last 1000 of settings, and as many of pods, in its state directory. Older ones are in
    its log.
    """
    answer = context.ask("events", count=count, settings=settings)
    print_as(output, answer, _HEADER, [_row(event) for event in answer["events"]], _DROPPABLE)
    if not answer["kept"]:
        click.echo("qgpuctl: qgpud has no state directory: it loses events when it ends; use --state-dir", err=True)


def _row(event: dict[str, Any]) -> tuple[str, ...]:
    gpu = f"pGPU {event['gpu']}" if "gpu" in event else ""
    on = str(event.get("name") or event.get("uid") or gpu or "-")
    change = changed(event["old"], event["new"]) if "new" in event else granted(event.get("grants", {}))
    if gpu and gpu != on and "grants" not in event and "new" not in event:  # where a pod yields memory
        change = gpu
    failed = f"; failed: {event['failed']}" if "failed" in event else ""
    return event["at"], who(event["by"]), event["what"], on, change + failed
