"""How far a trace's totals are from the ledger's: two pods 2:1 and an online pod, under Burst and Fixed Share.

    python bench/trace_total.py [--plane seccomp|sim] [--seconds 5] [--keep FOLDER]

Writes trace_total_error (on the simulator: sim_trace_total_error) into docs/results/host.json: the largest relative
difference between a pod's runs in the file and its GPU time in the ledger. It also measures what recording costs: CPU
time of the daemon and its helpers over the same seconds without and with it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import host_figures
from harness import Bench
from script import DRIVER


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plane", default="seccomp" if DRIVER.exists() else "sim", choices=["sim", "seccomp", "kmod"])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--keep", type=Path, help="leave the traces in this folder")
    options = parser.parse_args()
    bench = Bench(options.plane)
    keep = options.keep or bench.directory
    keep.mkdir(parents=True, exist_ok=True)
    figures: dict[str, object] = {}
    worst, before = 0.0, "sim_" if bench.simulated else ""
    try:
        with bench.daemon():
            device = bench.ask("status")["gpus"][0]["name"]
            pods = [bench.pod("two", "1ms", cores=60), bench.pod("one", "1ms", cores=30)]
            pods.append(bench.pod("chat", "100us", "--period", "10ms", pod_class="online"))
            bench.wait_busy(*pods)
            for policy in ("burst-share", "fixed-share"):
                bench.policy(policy)
                time.sleep(2)
                idle_s = -bench.cpu_s()
                time.sleep(options.seconds)
                idle_s += bench.cpu_s()
                file = keep / f"{policy}.pftrace"
                busy_s = -bench.cpu_s()
                told = bench.ctl("trace", "--seconds", str(options.seconds), "--out", str(file), "-o", "json")
                busy_s += bench.cpu_s()
                trace = json.loads(told)
                print(policy, json.dumps(trace), f"CPU {idle_s:.2f} s without, {busy_s:.2f} s with")
                worst = max(worst, trace["error"])
                name = f"{before}trace_{policy.replace('-', '_')}"
                figures |= {
                    f"{name}_switches": sum(pod["runs"] for pod in trace["pods"]),
                    f"{name}_cpu_s": [round(idle_s, 2), round(busy_s, 2)],
                    f"{name}_lost": trace["lost"] + trace["dropped"] + trace["gaps"],
                }
    finally:
        bench.close()
    command = f"python bench/trace_total.py --plane {options.plane} --seconds {options.seconds:g}"
    host_figures.keep(command, device, {f"{before}trace_total_error": worst} | figures)
    print(f"{before}trace_total_error {worst:.3g}")


if __name__ == "__main__":
    main()
