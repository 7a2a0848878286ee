"""What the closed loop does on the simulated pGPU: shares over time of pods that timeslices don't bind.

Runs the real loop, policies and ledger. Writes the picture and the figures that docs/feedback.md shows:

    python bench/feedback.py [--out docs/results]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qgpu.load.spec import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, Grant, Plan, Snapshot
from qgpu.policies import compose
from qgpu.sched import loop
from qgpu.sched.ledger import Ledger
from qgpu.sched.sim import SimHost

PERIOD_NS = 100 * NS_PER_MS
DURATION_S = 10
#: The rival rests and comes back, for all to see.
LEAVES_S, RETURNS_S = 6, 8

FLOOD = Workload(kernel_us=1000, batch=0)
BATCHES = {
    size: Workload(kernel_us=work_us, batch=1, gap_us=gap_us)
    for size, work_us, gap_us in ((64, 1000, 184), (128, 7930, 328), (256, 15_211, 330))
}


@dataclass(frozen=True, slots=True)
class Moment:
    """One tick: when, each pod's share since the last, and the first pod's window in ms (0: no gate moves)."""

    at_s: float
    shares: Mapping[str, float]
    window_ms: float


def pair(a: Workload, b: Workload) -> list[Moment]:
    """Share 2:1 by Burst Share; the second pod goes away for a while."""
    host = SimHost()
    backend = host.backend(0)
    for name, cores, workload in (("a", 66, a), ("b", 33, b)):
        host.admit(name, {0: Grant(cores=cores)})
        host.start_load(name, 0, workload)
    host.call_at(0, LEAVES_S * NS_PER_S, lambda: host.stop_load(2))
    host.call_at(0, RETURNS_S * NS_PER_S, lambda: _start(host, b))
    policy, plans = compose("burst-share", "best-effort"), []

    def noted(snapshot: Snapshot) -> Plan:
        plans.append(policy(snapshot))
        return plans[-1]

    ledger, moments = Ledger(0), []
    used = {"a": 0, "b": 0}
    while backend.now_ns < DURATION_S * NS_PER_S:
        began_ns = ledger.now_ns or 0
        ledger = loop.tick(backend, loop.Settings(noted, PERIOD_NS), ledger)
        now_ns = ledger.now_ns or 0
        if now_ns == began_ns:
            continue
        now = {name: account.used_ns for name, account in ledger.accounts.items()}
        shares = {name: (now[name] - used[name]) / (now_ns - began_ns) for name in now}
        windows = plans[-1].pods[0].windows
        moments.append(Moment(now_ns / NS_PER_S, shares, windows[0].end_ns / NS_PER_MS if windows else 0.0))
        used = now
    return moments


def figures(moments: Sequence[Moment]) -> dict[str, float]:
    """Say what is left when it has settled, until the second pod goes."""
    settled = [moment for moment in moments if 2 < moment.at_s < LEAVES_S]
    a, b = (sum(moment.shares[name] for moment in settled) for name in "ab")
    first = next((moment.at_s for moment in moments if moment.window_ms), 0.0)
    return {
        "ratio": a / b,
        "gpu_time": (a + b) / len(settled),
        "gates_from_s": first,
        "share_error_pp_100ms_max": 100
        * max(abs(m.shares["a"] / (m.shares["a"] + m.shares["b"]) - 2 / 3) for m in settled),
    }


def draw(runs: Mapping[str, Sequence[Moment]], file: Path) -> None:
    """Draw a row of shares for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.2 * len(runs)), layout="constrained")
    rows = figure.subplots(len(runs), 1, sharex=True)
    for axes, (name, moments) in zip(rows, runs.items(), strict=True):
        times = [moment.at_s for moment in moments]
        for pod, quota in (("a", 2 / 3), ("b", 1 / 3)):
            (line,) = axes.step(
                times, [moment.shares[pod] for moment in moments], where="pre", linewidth=1.2, label=pod
            )
            axes.axhline(quota, color=line.get_color(), linestyle=":", linewidth=1.0)
        gated = [moment.window_ms > 0 for moment in moments]
        axes.fill_between(times, 0, 1.05, where=gated, color="0.92", step="pre", linewidth=0, label="turns by gate")
        axes.set(ylim=(0, 1.05), ylabel="share of GPU time", title=name)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    rows[-1].set(xlim=(0, DURATION_S), xlabel="simulated time, s (per 100 ms; dotted: share asked for)")
    figure.savefig(file, metadata={"Date": None})


def _start(host: SimHost, workload: Workload) -> None:
    host.start_load("b", 0, workload)


def main() -> None:
    """Run, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    out = parser.parse_args().out
    runs = {
        "two floods": pair(FLOOD, FLOOD),
        **{f"two pods that synchronise every batch of {size}": pair(load, load) for size, load in BATCHES.items()},
        "batches of 128 beside a flood": pair(BATCHES[128], FLOOD),
    }
    draw(runs, out / "sim-feedback.svg")
    results = {name: figures(moments) for name, moments in runs.items()}
    (out / "sim-feedback.json").write_text(json.dumps({"schema": "qgpu/v1", "runs": results}, indent=2) + "\n")
    for name, values in results.items():
        print(f"{name:45} " + "  ".join(f"{key} {value:.3f}" for key, value in values.items()))


if __name__ == "__main__":
    main()
