"""What a latency target gives and costs on the simulated pGPU: latency added online, and speed kept offline.

Runs the real policies and loop. Writes the picture and the figures of docs/feedback.md:

    python bench/latency_target.py [--out docs/results]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from qgpu.config import GpuSettings
from qgpu.load.workload import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, Grant, PodClass
from qgpu.simulate import scenario
from qgpu.simulate.report import PodReport
from qgpu.simulate.scenario_file import Scenario, ScenarioPod

DURATION_NS = 20 * NS_PER_S
TARGETS_MS = (None, 0.3, 0.5, 1.0, 2.0, 5.0, 20.0)
FLOOD = Workload(kernel_us=1000, batch=0, warmup_s=2)


def requests(period_us: float, kernel_us: float = 100) -> Workload:
    """Return a service whose requests take this much GPU time."""
    return Workload(kernel_us=kernel_us, batch=1, period_us=period_us, warmup_s=2)


MIXES: dict[str, tuple[Sequence[Workload], int]] = {
    "100 requests a second, one flood": ([requests(10_000)], 1),
    "100 requests a second, four floods": ([requests(10_000)], 4),
    "1000 requests a second, one flood": ([requests(1_000)], 1),
    "two services, 100 and 10 a second, one flood": ([requests(10_000), requests(100_000, 50_000)], 1),
}


def measure(online: Sequence[Workload], floods: int, target_ms: float | None) -> dict[str, float]:
    """Run one mix: the µs that sharing adds to the first service's p99, and the part of their speed floods keep."""
    target_ns = None if target_ms is None else round(target_ms * NS_PER_MS)
    front = Grant(PodClass.ONLINE, latency_target_ns=target_ns)
    pods = [
        *(ScenarioPod(f"service-{n}", front, (load,), 0, DURATION_NS) for n, load in enumerate(online)),
        *(ScenarioPod(f"flood-{n}", Grant(), (FLOOD,), 0, DURATION_NS) for n in range(floods)),
    ]
    report = scenario.run(Scenario("latency target", DURATION_NS, GpuSettings("best-effort"), tuple(pods), ()))
    return {
        "added_p99_us": _added_us(report.pods[0]),
        "offline_kept": sum(pod.vs_alone for pod in report.pods[len(online) :]),
        "switching": report.switching,
    }


def _added_us(pod: PodReport) -> float:
    assert pod.latency_us is not None
    assert pod.alone_latency_us is not None
    return pod.latency_us.p99 - pod.alone_latency_us.p99


def draw(runs: Mapping[str, Mapping[float | None, Mapping[str, float]]], file: Path) -> None:
    """Draw what a target gives and costs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    added, switching = figure.subplots(1, 2)
    for name, by_target in runs.items():
        points = [(target, row) for target, row in by_target.items() if target is not None]
        targets = [target for target, _ in points]
        added.plot(targets, [row["added_p99_us"] / 1000 for _, row in points], marker="o", label=name)
        switching.plot(targets, [100 * row["switching"] for _, row in points], marker="o", label=name)
    added.plot(targets, targets, color="0.5", linestyle=":", label="the target")
    added.set(xscale="log", yscale="log", xlabel="latency target, ms", ylabel="added to p99, ms")
    switching.set(xscale="log", xlabel="latency target, ms", ylabel="switching, % of the card", ylim=(0, None))
    added.legend(fontsize="small")
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Run, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    out = parser.parse_args().out
    runs = {
        name: {target: measure(online, floods, target) for target in TARGETS_MS}
        for name, (online, floods) in MIXES.items()
    }
    draw(runs, out / "sim-latency-target.svg")
    results = {
        name: {"none" if target is None else f"{target:g} ms": row for target, row in by_target.items()}
        for name, by_target in runs.items()
    }
    (out / "sim-latency-target.json").write_text(json.dumps({"schema": "qgpu/v1", "runs": results}, indent=2) + "\n")
    for name, by_target in results.items():
        for target, row in by_target.items():
            print(f"{name:45} {target:>7}  " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
