"""``qgpuctl top``: who gets how much of which pGPU, from true GPU time, redrawn until q."""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from qgpu.cli.context import Context, pass_context
from qgpu.cli.output import cores, memory, output_option, table
from qgpu.control import Client

_HEADER = ("GPU", "POD", "CLASS", "QUOTA", "SHARE", "", "HELD", "LIMIT", "BUSY")
_BAR = 20
_HOME_AND_CLEAR = "\x1b[H\x1b[J"


@click.command()
@click.option("-1", "--once", is_flag=True, help="Print one table and end.")
@click.option("--every", type=click.FloatRange(0.2, 60), default=1.0, show_default=True, help="Seconds between looks.")
@output_option
@pass_context
def top(context: Context, once: bool, every: float, output: str) -> None:
    """Show live who gets how much of each pGPU; q ends it."""
    with context.connect() as client, _keyboard() as told_to_end:
        before = _look(client)
        while not told_to_end(every):
            now = _look(client)
            if output == "json":
                click.echo(json.dumps({"schema": now["schema"], "shares": _shares(before, now)}))
            else:
                click.echo(_HOME_AND_CLEAR * (sys.stdout.isatty() and not once) + _page(now, _shares(before, now)))
            if once:
                return
            before = now


@contextmanager
def _keyboard() -> Iterator[Callable[[float], bool]]:
    """Give a function that waits some seconds and tells whether q was pressed meanwhile."""
    if not sys.stdin.isatty():
        yield _sleep
        return

    def pressed(seconds: float) -> bool:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return bool(ready) and os.read(sys.stdin.fileno(), 64)[:1] in (b"q", b"Q", b"")

    as_found = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, as_found)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _look(client: Client) -> dict[str, Any]:
    return client.call("status") | {"pods": client.call("pod.list")["pods"]}


def _shares(before: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    """Turn two looks into shares: GPU time over the time between the samples that reported it."""
    used = {(pod["name"], usage["gpu"]): usage for pod in before["pods"] for usage in pod["usage"]}
    rows = []
    for pod in now["pods"]:
        for grant, usage in zip(pod["grants"], pod["usage"], strict=True):
            last = used.get((pod["name"], grant["gpu"]), {"now_ns": usage["now_ns"], "used_ns": 0})
            elapsed_ns = usage["now_ns"] - last["now_ns"]
            share = max(0.0, (usage["used_ns"] - last["used_ns"]) / elapsed_ns) if elapsed_ns > 0 else 0.0
            rows.append(
                {
                    "pod": pod["name"],
                    **grant,
                    "share": round(min(1.0, share), 4),
                    "held": usage["memory"],
                    "busy": usage["busy"],
                }
            )
    return sorted(rows, key=lambda row: (row["gpu"], row["class"] != "online", row["pod"]))


def _page(now: dict[str, Any], shares: list[dict[str, Any]]) -> str:
    gpus = ", ".join(f"pGPU {gpu['index']} {gpu['policy']}" for gpu in now["gpus"])
    title = f"qgpu {now['version']} on {now['plane']}: {gpus}"
    return "\n".join([title, *table(_HEADER, [_row(share) for share in shares])])


def _row(share: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(share["gpu"]),
        share["pod"],
        share["class"],
        cores(share["cores"]),
        f"{share['share']:6.1%}",
        ("#" * round(share["share"] * _BAR)).ljust(_BAR, "."),
        memory(share["held"]),
        memory(share["memory"]),
        "yes" if share["busy"] else "no",
    )
