"""``qgpuctl trace``: which pod ran on which pGPU when, by context switches, as a file for Perfetto."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import click

from qgpu.cli import completion
from qgpu.cli.context import Context, pass_context
from qgpu.cli.output import cores, output_option, print_json, print_table, writing
from qgpu.cli.params import PGPU
from qgpu.entry_point import Seconds
from qgpu.ipc.control_socket import SCHEMA
from qgpu.linux.shutdown import Shutdown
from qgpu.model import NS_PER_S
from qgpu.trace.perfetto import encode
from qgpu.trace.recording import GpuTrack, PodTrack, Recording, record

_HEADER = ("GPU", "POD", "CLASS", "QUOTA", "RUNS", "TRACED", "LEDGER", "SHARE")


@click.command()
@click.option("--seconds", type=Seconds(0.1, 600), default=10.0, show_default=True, help="How long.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The file to write.")
@click.option("--gpu", type=PGPU, shell_complete=completion.gpus, help="Only this pGPU.")
@output_option
@pass_context
def trace(context: Context, seconds: float, out: Path, gpu: int | None, output: str) -> None:
    """Record when pods run, and write a trace for ui.perfetto.dev. Ctrl-C ends it early.

    The trace has one track per pod from the hardware's context switches, with its gate, share and suspensions, and
    plans and online wake-ups.
    """
    stop = Shutdown(signal.SIGINT)
    with writing(out) as file:
        with context.connect() as client:
            recording = record(client, seconds, gpu, stop.wait)
        file.write(encode(recording))
    if output == "json":
        print_json(_json(recording))
        return
    print_table(_HEADER, [_row(gpu, pod) for gpu in recording.gpus.values() for pod in gpu.pods.values()])
    click.echo(
        f"{recording.span_ns / NS_PER_S:.1f} s in {out}; runs and ledger differ by {recording.error:.4%} at most"
    )
    for count, what in (
        (recording.dropped, "runs were fetched too late and dropped"),
        (recording.lost, "context switches were lost by the hardware"),
        (recording.gaps, "samples came without their runs"),
    ):
        if count:
            click.echo(f"qgpuctl: {count} {what}: totals do not include them", err=True)


def _json(recording: Recording) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "seconds": recording.span_ns / NS_PER_S,
        "error": recording.error,
        "dropped": recording.dropped,
        "lost": recording.lost,
        "gaps": recording.gaps,
        "pods": [
            {
                "gpu": gpu.index,
                "pod": pod.pod,
                "class": pod.pod_class,
                "cores": pod.cores,
                "runs": len(pod.runs),
                "traced_ns": pod.traced_ns,
                "ledger_ns": pod.ledger_ns,
            }
            for gpu in recording.gpus.values()
            for pod in gpu.pods.values()
        ],
    }


def _row(gpu: GpuTrack, pod: PodTrack) -> tuple[str, ...]:
    return (
        str(gpu.index),
        pod.pod,
        pod.pod_class,
        cores(pod.cores),
        str(len(pod.runs)),
        f"{pod.traced_ns / NS_PER_S:.3f} s",
        f"{pod.ledger_ns / NS_PER_S:.3f} s",
        f"{pod.traced_ns / gpu.span_ns if gpu.span_ns else 0.0:.1%}",
    )
