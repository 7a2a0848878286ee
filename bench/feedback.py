"""Shares over time under the closed loop, on the simulated pGPU, for pods that timeslices do not bind.

Runs the real loop, policies and ledger. Writes the picture and the figures of docs/feedback.md. The table there shows
the worst second after the first two, with feedback and without (every pod then keeps its slice of the period, whatever
was measured):

    python bench/feedback.py [--out docs/results]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from qgpu.load.workload import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, Grant, Plan, Sharing, Snapshot
from qgpu.planes.sim.host import SimHost
from qgpu.policies.registry import compose
from qgpu.sched import loop
from qgpu.sched.ledger import Ledger

PERIOD_NS = 100 * NS_PER_MS
DURATION_S = 10
#: The time before this is not judged.
SETTLED_S = 2
#: In the picture the rival rests and comes back, to show both transitions.
LEAVES_S, RETURNS_S = 6, 8

FLOOD = Workload(kernel_us=1000, batch=0)
BATCHES = {
    size: Workload(kernel_us=work_us, batch=1, gap_us=gap_us)
    for size, work_us, gap_us in ((64, 1000, 184), (128, 7930, 328), (256, 15_211, 330))
}


def batches(kernel_us: float) -> Workload:
    """Return a closed loop that synchronises after each kernel and pauses for 20 µs."""
    return Workload(kernel_us=kernel_us, batch=1, gap_us=20)


@dataclass(frozen=True, slots=True)
class Mix:
    """Pods, each with its quota and what its processes do, and the policy they share by."""

    pods: Sequence[tuple[int, Sequence[Workload]]]
    policy: str = "burst-share"

    @property
    def parts(self) -> dict[str, float]:
        """Return each pod's due share: of the used GPU time; under Fixed Share, of all time."""
        whole = 100 if self.policy == "fixed-share" else sum(cores for cores, _ in self.pods)
        return {name: cores / whole for name, (cores, _) in zip("abc", self.pods, strict=False)}


def pair(a: Workload, b: Workload) -> Mix:
    """Share 2:1."""
    return Mix([(66, [a]), (33, [b])])


MIXES = {
    "two floods": pair(FLOOD, FLOOD),
    **{f"batches of {size}": pair(load, load) for size, load in BATCHES.items()},
    "batches of 128 beside a flood": pair(BATCHES[128], FLOOD),
    "95 % and 5 %, batches of 2 ms": Mix([(95, [batches(2000)]), (5, [batches(2000)])]),
    "50, 30 and 20 %: batches of 5 and 3 ms, a flood": Mix(
        [(50, [batches(5000)]), (30, [batches(3000)]), (20, [FLOOD])]
    ),
    "two processes beside one, floods": Mix([(50, [FLOOD, FLOOD]), (50, [FLOOD])]),
    "Fixed Share, 60 and 30 %, floods": Mix([(60, [FLOOD]), (30, [FLOOD])], "fixed-share"),
}
SHOWN = ("two floods", *(f"batches of {size}" for size in BATCHES), "batches of 128 beside a flood")


@dataclass(frozen=True, slots=True)
class Moment:
    """One tick: its time and length, each pod's share of it, and the first pod's window in ms (0: no gate)."""

    at_s: float
    elapsed_s: float
    shares: Mapping[str, float]
    window_ms: float


def run(mix: Mix, *, feedback: bool = True, leaving: bool = False) -> list[Moment]:
    """Run a mix; with ``leaving`` the second pod rests for a while."""
    host = SimHost()
    backend = host.backend(0)
    loads: dict[str, list[int]] = {}
    for name, (cores, workloads) in zip("abc", mix.pods, strict=False):
        host.admit(name, {0: Grant(cores=cores)})
        loads[name] = [host.start_load(name, 0, workload) for workload in workloads]
    if leaving:
        host.call_at(0, LEAVES_S * NS_PER_S, lambda: host.stop_load(loads["b"][0]))
        host.call_at(0, RETURNS_S * NS_PER_S, lambda: _start(host, mix.pods[1][1][0]))
    policy, plans = compose(mix.policy, "best-effort"), []

    def noted(snapshot: Snapshot) -> Plan:
        if not feedback:
            pods = tuple(pod._replace(debt_ns=0, satisfied=False, fits_slice=False) for pod in snapshot.pods)
            snapshot = replace(snapshot, pods=pods, offline=Sharing())
        plans.append(policy(snapshot))
        return plans[-1]

    ledger, moments = Ledger(0), []
    used = dict.fromkeys(loads, 0)
    while backend.now_ns < DURATION_S * NS_PER_S:
        began_ns = ledger.now_ns or 0
        ledger = loop.tick(backend, loop.Settings(noted, PERIOD_NS), ledger)
        now_ns = ledger.now_ns or 0
        if now_ns == began_ns:
            continue
        now = {name: account.used_ns for name, account in ledger.accounts.items()}
        shares = {name: (now[name] - used[name]) / (now_ns - began_ns) for name in now}
        windows = plans[-1].pods[0].windows
        window_ms = windows[0].end_ns / NS_PER_MS if windows else 0.0
        moments.append(Moment(now_ns / NS_PER_S, (now_ns - began_ns) / NS_PER_S, shares, window_ms))
        used = now
    return moments


def worst_pp(mix: Mix, moments: Sequence[Moment]) -> float:
    """Return the error of the worst pod in the worst second after the first two, in percentage points."""
    worst = 0.0
    for second, group in groupby(moments, key=lambda moment: int(moment.at_s - 1e-9)):
        if second < SETTLED_S or second >= DURATION_S:
            continue
        each = list(group)
        got = {name: sum(moment.shares[name] * moment.elapsed_s for moment in each) for name in mix.parts}
        whole = sum(moment.elapsed_s for moment in each) if mix.policy == "fixed-share" else sum(got.values())
        worst = max(worst, *(100 * abs(got[name] / whole - part) for name, part in mix.parts.items()))
    return worst


def figures(moments: Sequence[Moment]) -> dict[str, float]:
    """Return what a pair settles to until the second pod goes."""
    settled = [moment for moment in moments if SETTLED_S < moment.at_s < LEAVES_S]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    runs = {name: run(MIXES[name], leaving=True) for name in SHOWN}
    draw(runs, out / "sim-feedback.svg")
    results = {name: figures(moments) for name, moments in runs.items()}
    worst = {
        name: {how: worst_pp(mix, run(mix, feedback=how == "with")) for how in ("without", "with")}
        for name, mix in MIXES.items()
    }
    told = {"schema": "qgpu/v1", "runs": results, "worst_second_pp": worst}
    (out / "sim-feedback.json").write_text(json.dumps(told, indent=2) + "\n")
    for name, values in results.items():
        print(f"{name:47} " + "  ".join(f"{key} {value:.3f}" for key, value in values.items()))
    for name, row in worst.items():
        print(f"{name:47} worst second, pp: {row['without']:5.1f} without feedback, {row['with']:.1f} with")


if __name__ == "__main__":
    main()
