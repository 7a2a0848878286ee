"""(g) What scheduling costs as pods and pGPUs grow: the CPU time of ledger, policy and plan, up to 64 pods on 8 pGPUs.

    python bench/daemon_cost.py

The daemon's loop runs on simulated cards in virtual time, every pod flooding, and its CPU time per second of theirs is
taken without what simulating the cards costs. On a GPU the whole of qgpu (daemon, guardian, launchers) is measured too,
with pods that flood.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from figures import Figure, at_most, median
from plots import Plot
from script import Script, claim

from qgpu.load.spec import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, Grant
from qgpu.policies import compose
from qgpu.sched.ledger import Ledger
from qgpu.sched.loop import until_due
from qgpu.sched.sim import SimHost

PODS, PGPUS = (1, 4, 16, 64), (1, 2, 4, 8)
LIMIT_PERCENT = 2.0
_PERIOD_NS = 100 * NS_PER_MS
_SECONDS = 10
_GPU_PODS = (1, 4, 16)


def measure(script: Script) -> list[Figure]:
    """Measure every number of pods, each on every number of pGPUs."""
    costs: dict[tuple[int, int], list[float]] = {}
    for pods in PODS:
        one = [_percent(pods, script.scale) for _ in range(3)]
        for pgpus in PGPUS:
            # Loops share nothing but the interpreter, so the cost of eight is that of one eight times; the
            # largest is run in full.
            full = pgpus == PGPUS[-1]
            costs[pods, pgpus] = [_percent(pods, script.scale, pgpus)] if full else [p * pgpus for p in one]
        script.say(f"{pods} pods: " + ", ".join(f"{n} pGPUs {min(costs[pods, n]):.2f} %" for n in PGPUS))
    lines = {f"{n} pGPUs": [(pods, min(costs[pods, n])) for pods in PODS] for n in PGPUS}
    script.plots.append(
        Plot("what scheduling costs", "pods on each pGPU", "% of a core", lines, (LIMIT_PERCENT,), log_x=True)
    )
    note = "of a core; ledger, policy and plan every 100 ms, all pods busy; simulated cards not counted"
    figures = [
        median(f"loop_cpu_percent_{pods}x{PGPUS[-1]}", costs[pods, PGPUS[-1]], note=note) for pods in PODS if pods != 16
    ]
    limit = at_most(LIMIT_PERCENT, " %")
    figures.append(median(f"loop_cpu_percent_16x{PGPUS[-1]}", costs[16, PGPUS[-1]], *limit, note=note))
    return figures if script.bench.simulated else [*figures, *_on_gpu(script)]


def _percent(pods: int, scale: float, pgpus: int = 1) -> float:
    """Return the CPU time of the loops of some pGPUs, in per cent of the time that passes for them."""
    host = SimHost(pgpus)
    for index in range(pods):
        host.admit(f"p{index}", {pgpu: Grant(cores=max(1, 100 // pods)) for pgpu in range(pgpus)})
        for pgpu in range(pgpus):
            host.start_load(f"p{index}", pgpu, Workload(kernel_us=1000, batch=0))
    policy = compose("burst-share", "best-effort")
    spent_ns = 0
    for pgpu in range(pgpus):
        backend, ledger = host.backend(pgpu), Ledger(pgpu)
        end_ns = backend.now_ns + round(_SECONDS * scale * NS_PER_S)
        while backend.now_ns < end_ns:  # qgpu.sched.loop.tick, with a clock around what is not the card's
            sample = backend.sample()
            began_ns = time.thread_time_ns()
            ledger = ledger.advance(sample)
            plan = policy(ledger.snapshot(_PERIOD_NS))
            ledger = ledger.planned(plan)
            spent_ns += time.thread_time_ns() - began_ns
            backend.apply(plan)
            backend.wait(until_due(sample.now_ns, plan.period_ns))
    return spent_ns / (_SECONDS * scale * NS_PER_S) * 100


def _on_gpu(script: Script) -> Sequence[Figure]:
    """Measure everything of qgpu on the real card as pods grow."""
    bench, figures = script.bench, []
    with bench.daemon():
        started = 0
        for count in _GPU_PODS:
            pods = [bench.pod(f"p{n}", "1ms") for n in range(started, count)]
            started = count
            bench.wait_busy(*pods)
            script.settle()
            cpu_s, began = bench.cpu_s(), time.monotonic()
            time.sleep(3 * script.scale)
            percent = (bench.cpu_s() - cpu_s) / (time.monotonic() - began) * 100
            script.say(f"{count} pods on the card: {percent:.2f} % of a core for all of qgpu")
            note = "of a core; daemon, guardian and launchers, pods that flood"
            figures.append(Figure(f"qgpu_cpu_percent_{count}x1", percent, note=note))
    return figures


SECTIONS = {"daemon_cost": measure}

if __name__ == "__main__":
    claim(SECTIONS, __doc__)
