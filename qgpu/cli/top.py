"""``qgpuctl top``: each pod's share of each pGPU by measured GPU time, redrawn until q; keys change the view."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import click

from qgpu import live_shares
from qgpu.cli.context import Context, pass_context
from qgpu.cli.output import output_option, terminal_width, with_units
from qgpu.cli.screen import Screen
from qgpu.cli.top_mode import Mode, chosen, pressed, settled
from qgpu.cli.top_page import View, page, room, table
from qgpu.entry_point import Seconds
from qgpu.errors import QgpuError
from qgpu.ipc.control_socket import Client

#: How many shares of each pod are kept: as many as the widest history shows.
_HISTORY = 60
#: How long a daemon may take to answer before the page says that it does not; keys wait as long.
_TIMEOUT_S = 2.0


@click.command()
@click.option("-1", "--once", is_flag=True, help="Print one table and end.")
@click.option("--every", type=Seconds(0.2, 60), default=1.0, show_default=True, help="Seconds between updates.")
@output_option
@pass_context
def top(context: Context, once: bool, every: float, output: str) -> None:
    """Show each pod's share of each pGPU, live.

    Keys: q quits, arrows and page keys choose a pod, space pauses, s sorts, c shows one class only, tab chooses a pGPU,
    the number of a policy sets it there after a yes, ? shows help.
    """
    interactive = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    plain = once or output == "json" or not interactive
    with suppress(KeyboardInterrupt):
        with context.connect() as client:
            if plain:
                _print(client, once, every, output)
        if not plain:
            connect = partial(Client, context.runtime_dir, min(context.timeout_s, _TIMEOUT_S))
            _show(_Watch(connect), every)


def _print(client: Client, once: bool, every: float, output: str) -> None:
    """Print a table, or a line of JSON, at each update: the output for files and other programs."""
    before = live_shares.read(client)
    while True:
        time.sleep(every)
        now = live_shares.read(client)
        shares = live_shares.shares(before, now)
        if output == "json":
            click.echo(json.dumps(with_units({"schema": now["schema"], "shares": shares})))
        else:
            click.echo(table(View(now, shares), terminal_width()))
        if once:
            return
        before = now


class _Watch:
    """Looks at the daemon again and again, whether or not it is there, and remembers shares."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        """Look for the first time. Raises a QgpuError without a daemon."""
        self._connect = connect
        self._client: Client | None = connect()
        self._history: dict[tuple[int, str], deque[float]] = {}
        self._below_quota = live_shares.BelowQuota()
        now = live_shares.read(self._client)
        self._before: dict[str, Any] | None = now
        self.view = View(now, live_shares.shares(now, now))

    def look(self) -> bool:
        """Look once more, and tell whether the daemon has just come back."""
        came_back = bool(self.view.lost)
        try:
            self._client = self._client or self._connect()
            now = live_shares.read(self._client)
        except QgpuError as error:
            self.close()
            self.view = View(self.view.now, self.view.shares, self._history, str(error))
            return False
        shares = live_shares.shares(self._before or now, now)
        seen = self._before is not None
        self._before = now
        if seen:  # a share needs two answers
            self._below_quota.settle(shares)
            self._remember(shares)
        self.view = View(now, shares, self._history)
        return came_back

    def close(self) -> None:
        """Hang up."""
        if self._client is not None:
            self._client.close()
        self._client = self._before = None

    def set_policy(self, gpu: int, policy: str) -> str:
        """Set a policy and return what to tell the user."""
        if self._client is None:
            return "not changed, because qgpud does not answer"
        try:
            answer = self._client.call("gpu.set", gpu=gpu, policy=policy)
        except QgpuError as error:
            return f"not changed: {error}"
        return f"pGPU {gpu}: {policy}{'' if answer.get('kept', True) else ', until qgpud ends'}"

    def _remember(self, shares: list[dict[str, Any]]) -> None:
        there = {(row["gpu"], row["pod"]) for row in shares}
        self._history = {key: past for key, past in self._history.items() if key in there}
        for row in shares:
            self._history.setdefault((row["gpu"], row["pod"]), deque(maxlen=_HISTORY)).append(row["share"])


def _show(watch: _Watch, every: float) -> None:
    """Redraw the page until a key ends it."""
    mode = Mode()
    with Screen() as screen:
        due_s = time.monotonic() + min(every, 0.5)  # show the first shares soon
        while not mode.ended:
            mode = settled(mode, watch.view.now)
            screen.draw(page(mode, watch.view, *screen.size))
            keys = screen.keys(due_s - time.monotonic())
            for key in keys:
                asking, height = mode.asking, room(watch.view, screen.size[1])
                mode, policy = pressed(mode, key, watch.view.now, chosen(mode, watch.view.shares), height)
                if policy is not None:
                    mode = mode.saying(watch.set_policy(mode.gpu, policy))
                    watch.look()  # the next question compares with what is in force
                if mode.asking and not asking:
                    break  # what was typed ahead, or pasted, is no answer to this question
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + every
                if not mode.paused and watch.look():
                    mode = mode.saying("qgpud is back")
    watch.close()
