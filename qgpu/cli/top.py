"""``qgpuctl top``: each pod's share of each pGPU by measured GPU time, redrawn until q; keys change the view."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress

import click

from qgpu import live_shares
from qgpu.cli.context import Context, pass_context
from qgpu.cli.output import output_option
from qgpu.cli.params import Seconds
from qgpu.cli.screen import Screen
from qgpu.cli.top_page import Mode, page, pressed
from qgpu.errors import QgpuError
from qgpu.ipc.control_socket import Client


@click.command()
@click.option("-1", "--once", is_flag=True, help="Print one table and end.")
@click.option("--every", type=Seconds(0.2, 60), default=1.0, show_default=True, help="Seconds between updates.")
@output_option
@pass_context
def top(context: Context, once: bool, every: float, output: str) -> None:
    """Show each pod's share of each pGPU, live.

    Keys: q quits, space pauses, s sorts, r reverses, c shows one class only, tab chooses a pGPU, the number of a policy
    sets it there, ? shows help.
    """
    with suppress(KeyboardInterrupt), context.connect() as client:
        if once or output == "json" or not (sys.stdin.isatty() and sys.stdout.isatty()):
            _print(client, once, every, output)
        else:
            _show(client, every)


def _print(client: Client, once: bool, every: float, output: str) -> None:
    """Print a table, or a line of JSON, at each update: the output for files and other programs."""
    before = live_shares.look(client)
    while True:
        time.sleep(every)
        now = live_shares.look(client)
        shares = live_shares.shares(before, now)
        if output == "json":
            click.echo(json.dumps({"schema": now["schema"], "shares": shares}))
        else:
            click.echo("\n".join(page(Mode(), now, shares)))
        if once:
            return
        before = now


def _show(client: Client, every: float) -> None:
    """Redraw the page until a key ends it."""
    mode = Mode()
    before = live_shares.look(client)
    with Screen() as screen:
        screen.keys(min(every, 0.5))  # show the first shares soon
        now = live_shares.look(client)
        shares = live_shares.shares(before, now)
        while not mode.ended:
            screen.draw(page(mode, now, shares, width=screen.width, interactive=True))
            keys = screen.keys(every)
            for key in keys:
                mode, policy = pressed(mode, key, now)
                if policy is not None:
                    mode = _set_policy(client, mode, policy)
            if not keys and not mode.paused:
                before, now = now, live_shares.look(client)
                shares = live_shares.shares(before, now)


def _set_policy(client: Client, mode: Mode, policy: str) -> Mode:
    try:
        client.call("gpu.set", gpu=mode.gpu, policy=policy)
    except QgpuError as error:
        return mode.saying(str(error))
    return mode.saying(f"pGPU {mode.gpu}: {policy}")
