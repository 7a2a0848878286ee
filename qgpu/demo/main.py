"""``python -m qgpu.demo``: plays its scenes on a private daemon, shows them live and draws them at the end.

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
from qgpu.demo import plot
from qgpu.demo.live_table import LiveTable, Row
from qgpu.demo.plot import PlayedScene, Point
from qgpu.demo.private_daemon import PrivateDaemon, Reading
from qgpu.demo.scenes import CHAT, SCENES, Scene
from qgpu.errors import QgpuError

_READ_EVERY_S = 0.5
#: Long enough to average over turns of a hundred milliseconds.
_SPAN_READINGS = 3
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
    with PrivateDaemon(plane) as daemon:
        seconds = sum(scene.seconds for scene in SCENES) * scale
        click.echo(f"{daemon.device}, plane {daemon.plane}; about {seconds:.0f} s")
        daemon.calibrate([pod for scene in SCENES for pod in scene.starts])
        run = _Run(daemon, LiveTable(sys.stdout, fancy))
        for number, scene in enumerate(SCENES, 1):
            run.play(number, scene, scale)
        title = f"Pods sharing one {daemon.device} (plane {daemon.plane})"
    try:
        plot.draw(out, title, run.played, run.points)
    except QgpuError as error:
        click.echo(f"demo: {error}", err=True)
    else:
        click.echo(f"picture: {out}")


@dataclass(slots=True)
class _Run:
    """One run of all scenes."""

    daemon: PrivateDaemon
    table: LiveTable
    played: list[PlayedScene] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _readings: list[Reading] = field(default_factory=list)

    def play(self, number: int, scene: Scene, scale: float) -> None:
        """Play one scene: make its changes, then show what follows."""
        start_s = self._now_s()
        self.table.scene(number, len(SCENES), scene.policy, scene.caption)
        self.daemon.await_pods()
        if not self.played or self.played[-1].scene.policy != scene.policy:
            self.daemon.qgpuctl("gpu", "policy", "set", "0", scene.policy)
        for pod in scene.ends:
            self.daemon.end_pod(pod)
        for arguments in scene.amend:
            self.daemon.qgpuctl("pod", "set", *arguments)
        for pod in scene.starts:
            self.daemon.start_pod(pod)
        self._readings = [self.daemon.read()]
        end_s = start_s + scene.seconds * scale
        while (left_s := end_s - self._now_s()) > 0:
            time.sleep(min(left_s, _READ_EVERY_S))
            self._watch(scene)
        self.played.append(PlayedScene(scene, start_s, self._now_s()))

    def _watch(self, scene: Scene) -> None:
        reading = self.daemon.read()
        self._readings = [*self._readings, reading][-_SPAN_READINGS:]
        first = self._readings[0]
        if reading.now_ns <= first.now_ns:
            return
        span_ns = reading.now_ns - first.now_ns
        shares = {name: (used - first.used_ns.get(name, 0)) / span_ns for name, used in reading.used_ns.items()}
        point = Point(self._now_s(), shares, self.daemon.latency_us(CHAT))
        self.points.append(point)
        if self.table.fancy or len(self.points) % _PLAIN_EVERY == 0:
            self.table.show(point.at_s, [_row(name, scene, reading, point) for name in sorted(shares, key=_order)])

    def _now_s(self) -> float:
        return time.monotonic() - self._began


def _order(name: str) -> int:
    names = [pod.name for scene in SCENES for pod in scene.starts]
    return names.index(name) if name in names else len(names)


def _row(name: str, scene: Scene, reading: Reading, point: Point) -> Row:
    grant = reading.grants[name]
    latency_us = point.latency_us if name == CHAT.name else None
    return Row(name, grant["class"], grant["cores"], point.shares[name], scene.targets.get(name), latency_us)
