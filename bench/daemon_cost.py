"""(g) The CPU time of scheduling as pods and pGPUs grow: ledger, policy and plan, up to 64 pods on 8 pGPUs.

    python bench/daemon_cost.py

The daemon's loop runs on simulated cards in virtual time, with every pod flooding. Its CPU time is counted per second
of virtual time, without the cost of simulating the cards: samples are recorded, and the decisions made from them again,
because on some hosts reading the clock costs more than a decision. For comparison: a real daemon with 16 pods on 8
simulated cards, including the cost of simulation; and on a GPU all of qgpu (daemon, guardian, launchers), with pods
that flood.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

from figures import Figure, at_most, median
from harness import QGPUD, Bench
from plots import Plot
from script import Script, claim

from qgpu.ipc.control_socket import Client
from qgpu.load.workload import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, Grant, Plan, Policy, Sample
from qgpu.planes.sim.host import SimHost
from qgpu.policies.registry import compose
from qgpu.sched.ledger import Ledger
from qgpu.sched.loop import until_due

PODS, PGPUS = (1, 4, 16, 64), (1, 2, 4, 8)
LIMIT_PERCENT = 2.0
_LIMITED = 16
_ROUNDS = 5
_PERIOD_NS = 100 * NS_PER_MS
_SECONDS = 10
_GPU_PODS = (1, 4, 16)
_STARTED_S = 5.0


def measure(script: Script) -> list[Figure]:
    """Measure every number of pods, each on every number of pGPUs."""
    costs: dict[tuple[int, int], list[float]] = defaultdict(list)
    for number in range(_ROUNDS):  # if the host is slow for seconds, only one of the rounds is slow
        for pods in PODS:
            one = _percent(pods, script.scale)
            for pgpus in PGPUS[:-1]:
                # Loops share nothing but the interpreter, so the cost of two is that of one twice; the largest
                # number is run in full.
                costs[pods, pgpus].append(one * pgpus)
            if pods <= _LIMITED or not number:
                costs[pods, PGPUS[-1]].append(_percent(pods, script.scale, PGPUS[-1]))
    for pods in PODS:
        script.say(f"{pods} pods: " + ", ".join(f"{n} pGPUs {min(costs[pods, n]):.2f} %" for n in PGPUS))
    lines = {f"{n} pGPUs": [(pods, min(costs[pods, n])) for pods in PODS] for n in PGPUS}
    script.plots.append(
        Plot("what scheduling costs", "pods on each pGPU", "% of a core", lines, (LIMIT_PERCENT,), log_x=True)
    )
    note = "of a core; ledger, policy and plan every 100 ms, all pods busy; simulated cards not counted"
    figures = [
        median(f"loop_cpu_percent_{pods}x{PGPUS[-1]}", costs[pods, PGPUS[-1]], note=note)
        for pods in PODS
        if pods != _LIMITED
    ]
    limit = at_most(LIMIT_PERCENT, " %")
    figures.append(median(f"loop_cpu_percent_{_LIMITED}x{PGPUS[-1]}", costs[_LIMITED, PGPUS[-1]], *limit, note=note))
    figures.append(_whole_daemon(script))
    return figures if script.bench.simulated else [*figures, *_on_gpu(script)]


def _percent(pods: int, scale: float, pgpus: int = 1) -> float:
    """Return the CPU time of the loops of some pGPUs, in per cent of their virtual time."""
    host = SimHost(pgpus)
    for index in range(pods):
        host.admit(f"p{index}", {pgpu: Grant(cores=max(1, 100 // pods)) for pgpu in range(pgpus)})
        for pgpu in range(pgpus):
            host.start_load(f"p{index}", pgpu, Workload(kernel_us=1000, batch=0))
    policy = compose("burst-share", "best-effort")
    recorded = []
    for pgpu in range(pgpus):
        backend, ledger, samples = host.backend(pgpu), Ledger(pgpu), []
        end_ns = backend.now_ns + round(_SECONDS * scale * NS_PER_S)
        while backend.now_ns < end_ns:
            samples.append(sample := backend.sample())
            ledger, plan = _decide(ledger, sample, policy)
            backend.apply(plan)
            backend.wait(until_due(sample.now_ns, plan.period_ns))
        recorded.append((Ledger(pgpu), samples))
    began_ns = time.thread_time_ns()
    for ledger, samples in recorded:
        for sample in samples:
            ledger, _ = _decide(ledger, sample, policy)
    return (time.thread_time_ns() - began_ns) / (_SECONDS * scale * NS_PER_S) * 100


def _decide(ledger: Ledger, sample: Sample, policy: Policy) -> tuple[Ledger, Plan]:
    """Do what qgpu.sched.loop.tick does between two calls of the card."""
    ledger = ledger.advance(sample)
    plan = policy(ledger.snapshot(_PERIOD_NS))
    return ledger.planned(plan), plan


def _whole_daemon(script: Script) -> Figure:
    """Measure a real daemon together with the cards that it simulates."""
    pods, pgpus = _LIMITED, PGPUS[-1]
    grants = {str(pgpu): {"class": "offline", "cores": 100 // pods} for pgpu in range(pgpus)}
    bench = Bench("sim", [*QGPUD, "--sim-gpus", str(pgpus)])
    try:
        bench.start_daemon()
        with Client(bench.runtime_dir) as client:
            for index in range(pods):
                client.call("pod.create", name=f"p{index}", grants=grants)
                for pgpu in range(pgpus):
                    work = Workload(kernel_us=1000, batch=0).to_dict()
                    client.call("sim.start", pod=f"p{index}", gpu=pgpu, workload=work)
            percent = _cpu_percent(script, bench)
    finally:
        bench.close()
    script.say(f"a daemon with {pods} pods on {pgpus} simulated cards: {percent:.2f} %")
    note = "of a core; a real daemon, the cards that it simulates included: more than it costs where cards are real"
    return Figure(f"sim_daemon_cpu_percent_{pods}x{pgpus}", percent, note=note)


def _cpu_percent(script: Script, bench: Bench) -> float:
    """Return the CPU time of all qgpu processes over some seconds once all pods have started, in per cent of that time.

    For some seconds after a start the loop ticks more often.
    """
    script.settle(_STARTED_S)
    cpu_s, began = bench.cpu_s(), time.monotonic()
    time.sleep(3 * script.scale)
    return (bench.cpu_s() - cpu_s) / (time.monotonic() - began) * 100


def _on_gpu(script: Script) -> Sequence[Figure]:
    """Measure everything of qgpu on the real card as pods grow."""
    bench, figures = script.bench, []
    with bench.daemon():
        started = 0
        for count in _GPU_PODS:
            pods = [bench.pod(f"p{n}", "1ms") for n in range(started, count)]
            started = count
            bench.wait_busy(*pods)
            percent = _cpu_percent(script, bench)
            script.say(f"{count} pods on the card: {percent:.2f} % of a core for all of qgpu")
            note = "of a core; daemon, guardian and launchers, pods that flood"
            figures.append(Figure(f"qgpu_cpu_percent_{count}x1", percent, note=note))
    return figures


SECTIONS = {"daemon_cost": measure}

if __name__ == "__main__":
    claim(SECTIONS, __doc__)
