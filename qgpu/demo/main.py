"""``python -m qgpu.demo``: plays the story on a private daemon, shows it live and draws it at the end.

A share is GPU time over the daemon's clock in the last second, but never across a change.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import click

from qgpu import entry_point
from qgpu.demo import picture
from qgpu.demo.picture import Played, Point
from qgpu.demo.show import Row, Table
from qgpu.demo.stage import Look, Stage
from qgpu.demo.story import CHAT, STORY, Scene
from qgpu.errors import QgpuError

_LOOK_S = 0.5
#: Long enough to average over turns of a hundred milliseconds.
_SPAN_LOOKS = 3
_PLAIN_EVERY = 4


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--plane", default="auto", type=click.Choice(["auto", "sim", "seccomp", "kmod"]), show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("qgpu-demo.png"), show_default=True)
@click.option("--duration-scale", type=click.FloatRange(0.1, 10), default=1.0, help="1 takes about a minute.")
def command(plane: str, out: Path, duration_scale: float) -> None:
    """Let pods come and go and policies change on one GPU, or on a simulated one if there is none.

    The demo starts its own daemon and ends it afterwards. It touches nothing else on the host.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _play(plane, out, duration_scale)


def main() -> None:
    """Run the demo."""
    entry_point.run("demo", command)


def _play(plane: str, out: Path, scale: float) -> None:
    fancy = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    with Stage(plane) as stage:
        click.echo(f"{stage.device}, plane {stage.plane}; about {sum(scene.seconds for scene in STORY) * scale:.0f} s")
        stage.calibrate([actor for scene in STORY for actor in scene.enter])
        performance = _Performance(stage, Table(sys.stdout, fancy))
        for number, scene in enumerate(STORY, 1):
            performance.play(number, scene, scale)
        title = f"Pods sharing one {stage.device} (plane {stage.plane})"
    try:
        picture.draw(out, title, performance.played, performance.points)
    except QgpuError as error:
        click.echo(f"demo: {error}", err=True)
    else:
        click.echo(f"picture: {out}")


@dataclass(slots=True)
class _Performance:
    """One run of the story."""

    stage: Stage
    table: Table
    played: list[Played] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _looks: list[Look] = field(default_factory=list)

    def play(self, number: int, scene: Scene, scale: float) -> None:
        """Play one scene: make its changes, then show what follows."""
        start_s = self._now_s()
        self.table.scene(number, len(STORY), scene.policy, scene.caption)
        self.stage.await_pods()
        if not self.played or self.played[-1].scene.policy != scene.policy:
            self.stage.change("gpu", "policy", "set", "0", scene.policy)
        for actor in scene.leave:
            self.stage.leave(actor)
        for arguments in scene.amend:
            self.stage.change("pod", "set", *arguments)
        for actor in scene.enter:
            self.stage.enter(actor)
        self._looks = [self.stage.look()]
        end_s = start_s + scene.seconds * scale
        while (left_s := end_s - self._now_s()) > 0:
            time.sleep(min(left_s, _LOOK_S))
            self._watch(scene)
        self.played.append(Played(scene, start_s, self._now_s()))

    def _watch(self, scene: Scene) -> None:
        look = self.stage.look()
        self._looks = [*self._looks, look][-_SPAN_LOOKS:]
        first = self._looks[0]
        if look.now_ns <= first.now_ns:
            return
        span_ns = look.now_ns - first.now_ns
        shares = {name: (used - first.used_ns.get(name, 0)) / span_ns for name, used in look.used_ns.items()}
        point = Point(self._now_s(), shares, self.stage.latency_us(CHAT))
        self.points.append(point)
        if self.table.fancy or len(self.points) % _PLAIN_EVERY == 0:
            self.table.show(point.at_s, [_row(name, scene, look, point) for name in sorted(shares, key=_order)])

    def _now_s(self) -> float:
        return time.monotonic() - self._began


def _order(name: str) -> int:
    names = [actor.name for scene in STORY for actor in scene.enter]
    return names.index(name) if name in names else len(names)


def _row(name: str, scene: Scene, look: Look, point: Point) -> Row:
    grant = look.grants[name]
    latency_us = point.latency_us if name == CHAT.name else None
    return Row(name, grant["class"], grant["cores"], point.shares[name], scene.targets.get(name), latency_us)
