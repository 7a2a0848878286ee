"""``qgpuctl report``: what pods asked for and got over some seconds, as one HTML page."""

from __future__ import annotations

import platform
import signal
from pathlib import Path

import click

from qgpu.cli import completion
from qgpu.cli.context import Context, pass_context
from qgpu.cli.output import writing
from qgpu.cli.params import PGPU
from qgpu.entry_point import Seconds
from qgpu.linux.shutdown import Shutdown
from qgpu.model import NS_PER_S
from qgpu.trace import page
from qgpu.trace.group_candidates import of_track
from qgpu.trace.recording import record


@click.command()
@click.option("--seconds", type=Seconds(0.1, 600), default=30.0, show_default=True, help="How long.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The HTML file to write.")
@click.option("--gpu", type=PGPU, shell_complete=completion.gpus, help="Only this pGPU.")
@pass_context
def report(context: Context, seconds: float, out: Path, gpu: int | None) -> None:
    """Record for some seconds and write an HTML page: shares, turns, gates, suspensions, refusals.

    Ctrl-C ends it early. It also says which pods hold a pGPU without running kernels, and would gain from a share
    group.
    """
    stop = Shutdown(signal.SIGINT)
    with writing(out) as file:
        with context.connect() as client:
            before, status = client.call("pod.list")["pods"], client.call("status")
            recording = record(client, seconds, gpu, stop.wait)
            refused = page.refusals(before, client.call("pod.list")["pods"])
            for now in client.call("gpu.list")["gpus"]:
                track = recording.gpus.get(now["index"])
                if track is not None and track.policy != now["policy"]:
                    track.policy += f", then {now['policy']}"
        about = page.About(status["plane"], status["driver"], status["version"], platform.node(), refused)
        file.write(page.write(recording, about).encode())
    click.echo(f"{recording.span_ns / NS_PER_S:.1f} s in {out}")
    for gpu_track in recording.gpus.values():
        if gain := of_track(gpu_track):
            click.echo(f"pGPU {gpu_track.index}: {gain}")
