"""Plots of simulated scenarios. The only file of the simulator that needs matplotlib."""

from __future__ import annotations

from math import nan
from pathlib import Path

from qgpu.errors import ConfigError, NotSupportedError
from qgpu.simulate.report import Report


def draw(report: Report, file: Path) -> None:
    """Draw each pod's share and quota over time. The file's suffix is the format.

    Raises NotSupportedError without matplotlib, ConfigError if the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotSupportedError("plots need matplotlib: pip install 'qgpu[plot]'") from error
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    times = [moment.at_s for moment in report.moments]
    for pod in report.pods:
        shares = [moment.shares.get(pod.name, 0.0) for moment in report.moments]
        (line,) = axes.step(times, shares, where="pre", label=f"{pod.name} ({pod.pod_class})", linewidth=1.2)
        quotas = [moment.quotas.get(pod.name, nan) for moment in report.moments]
        axes.step(times, quotas, where="pre", color=line.get_color(), linestyle=":", linewidth=1.0)
    axes.set(xlim=(0, report.duration_s), ylim=(0, 1.02), xlabel="simulated time, s", ylabel="share of the pGPU")
    axes.set_title(f"{report.scenario}: GPU time over time; dotted: quota")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
