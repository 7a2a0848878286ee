"""``qgpuctl simulate``: the shares and latencies pods would get, without a GPU and without a daemon."""

from __future__ import annotations

from pathlib import Path

import click

from qgpu.cli.output import output_option, print_json


@click.command()
@click.argument("scenario", type=click.Path(path_type=Path, readable=False))
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw shares over time to this file.")
@output_option
def simulate(scenario: Path, plot: Path | None, output: str) -> None:
    """Play a scenario (TOML) on a simulated pGPU and report what its pods got."""
    from qgpu.simulate import scenario as scenarios  # pulls in the whole simulator
    from qgpu.simulate.plot import check, draw

    if plot is not None:
        check(plot)
    report = scenarios.simulate(scenario)
    if output == "json":
        print_json(report.to_json())
    else:
        click.echo(report.table())
    if plot is not None:
        draw(report, plot)
