"""Runs a scenario: the real loop with the real policies on a simulated pGPU, in virtual time.

This module plays the events of the scenario, has admission check the grants, and counts what each pod got.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from qgpu import admission
from qgpu.admission import Occupancy
from qgpu.errors import ConfigError, QgpuError
from qgpu.load.stats import percentile
from qgpu.load.workload import Workload
from qgpu.model import NS_PER_S, Grant
from qgpu.planes.sim.engine import EngineTimes
from qgpu.planes.sim.host import SimHost
from qgpu.planes.sim.load import Progress
from qgpu.policies import registry
from qgpu.sched import loop
from qgpu.sched.ledger import Ledger
from qgpu.simulate import scenario_file
from qgpu.simulate.report import Latencies, Moment, PodReport, Report
from qgpu.simulate.scenario_file import GpuChange, PodChange, Scenario, ScenarioPod

#: The most moments for which shares are kept.
_MOMENTS = 120

#: How long a pod runs alone to measure its throughput alone, and for how many of its periods at least.
_ALONE_NS = 5 * NS_PER_S
_ALONE_PERIODS = 100


def simulate(path: Path) -> Report:
    """Run the scenario in ``path``. Raises ConfigError with file and key."""
    scenario = scenario_file.load(path)
    try:
        return run(scenario)
    except ConfigError:
        raise
    except QgpuError as error:
        raise ConfigError(f"{path}: {error}") from error


def run(scenario: Scenario) -> Report:
    """Run a scenario. Raises RefusedError if a grant or a change does not fit."""
    running = _Run(scenario)
    running.play()
    return running.report()


@dataclass(slots=True)
class _PodRun:
    """One pod in a run: its loads, its quota so far, and its results when it has left."""

    pod: ScenarioPod
    grant: Grant
    loads: list[int] = field(default_factory=list)
    results: list[Progress] = field(default_factory=list)
    since_ns: int = 0
    #: The sum of quota times duration in per cent x ns, and how many ns it had a quota.
    quota: int = 0
    quota_ns: int = 0

    def settle_quota(self, now_ns: int) -> None:
        if self.grant.cores is not None:
            self.quota += self.grant.cores * (now_ns - self.since_ns)
            self.quota_ns += now_ns - self.since_ns
        self.since_ns = now_ns


class _Run:
    """One run of a scenario: the current state and the measurements so far."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._host = SimHost()
        self._backend = self._host.backend(0)
        self._settings = scenario.settings
        self._pod_runs = {pod.name: _PodRun(pod, pod.grant) for pod in scenario.pods}
        self._moments: list[Moment] = []
        self._used_ns: dict[str, int] = {}
        self._seen_ns = 0
        self._times = EngineTimes()
        for change in scenario.changes:
            self._host.call_at(0, change.at_ns, partial(self._change, change))
        for name, pod_run in self._pod_runs.items():
            self._host.call_at(0, pod_run.pod.arrive_ns, partial(self._arrive, name))
            self._host.call_at(0, pod_run.pod.leave_ns, partial(self._leave, name))
        self._host.call_at(0, scenario.duration_ns, self._end)

    def play(self) -> None:
        """Run the loop to the scenario's end."""
        end_ns = self._scenario.duration_ns
        loop.run(
            self._backend,
            self._loop_settings,
            Ledger(0, card=self._host.pgpus()[0].name),
            lambda: self._backend.now_ns >= end_ns,
            self._look,
        )
        self._backend.close()

    def report(self) -> Report:
        """Return the result."""
        duration_ns = self._scenario.duration_ns
        times = self._times
        return Report(
            self._scenario.name,
            duration_ns / NS_PER_S,
            self._scenario.settings,
            times.useful_ns / duration_ns,
            times.switching_ns / duration_ns,
            times.idle_ns / duration_ns,
            tuple(_pod_report(pod_run) for pod_run in self._pod_runs.values()),
            tuple(self._moments),
        )

    def _loop_settings(self) -> loop.Settings:
        gpu = self._settings
        return loop.Settings(registry.compose(gpu.policy, gpu.online_policy), gpu.period_ns, gpu.offline_floor)

    def _arrive(self, name: str) -> None:
        pod_run, host = self._pod_runs[name], self._host
        grants = {0: pod_run.grant}
        admission.check_new(name, grants, self._occupancy())
        host.admit(name, grants)
        pod_run.since_ns = self._backend.now_ns
        pod_run.loads = [host.start_load(name, 0, workload) for workload in pod_run.pod.workloads]

    def _leave(self, name: str) -> None:
        pod_run, host = self._pod_runs[name], self._host
        pod_run.settle_quota(self._backend.now_ns)
        pod_run.results = [host.progress(load) for load in pod_run.loads]
        for load in pod_run.loads:
            host.stop_load(load)
        host.retire(name)

    def _change(self, change: GpuChange | PodChange) -> None:
        host = self._host
        if isinstance(change, GpuChange):
            admission.check_settings(0, host.pods(), change.settings)
            self._settings = change.settings
            return
        pod_run = self._pod_runs[change.pod]
        if any(pod.name == change.pod for pod in host.pods()):
            grants = {0: change.grant}
            admission.check_amended(change.pod, grants, self._occupancy())
            pod_run.settle_quota(self._backend.now_ns)
            host.amend(change.pod, grants)
        pod_run.grant = change.grant

    def _occupancy(self) -> Occupancy:
        return Occupancy(self._host.pods(), self._host.pgpus(), {0: self._settings})

    def _end(self) -> None:
        self._times = self._host.times(0)

    def _look(self, ledger: Ledger) -> None:
        """Record shares over time, no finer than a plot needs."""
        now_ns = ledger.now_ns or 0
        if now_ns - self._seen_ns < max(1, self._scenario.duration_ns // _MOMENTS):
            return
        used_ns = {name: account.used_ns for name, account in ledger.accounts.items()}
        elapsed_ns = now_ns - self._seen_ns
        shares = {name: (used - self._used_ns.get(name, 0)) / elapsed_ns for name, used in used_ns.items()}
        grants = {name: account.last.grant for name, account in ledger.accounts.items()}
        quotas = {name: grant.cores / 100 for name, grant in grants.items() if grant.cores is not None}
        self._moments.append(Moment(now_ns / NS_PER_S, shares, quotas))
        self._used_ns, self._seen_ns = used_ns, now_ns


def _pod_report(pod_run: _PodRun) -> PodReport:
    pod, stay_ns = pod_run.pod, pod_run.pod.leave_ns - pod_run.pod.arrive_ns
    gpu_ns = sum(result.gpu_ns for result in pod_run.results)
    alone = _alone(pod.workloads, stay_ns)
    rate, alone_rate = _rate(pod_run.results), _rate(alone)
    return PodReport(
        name=pod.name,
        pod_class=pod_run.grant.pod_class,
        cores=pod_run.quota / pod_run.quota_ns if pod_run.quota_ns else None,
        present_s=stay_ns / NS_PER_S,
        gpu_time_s=gpu_ns / NS_PER_S,
        share=gpu_ns / stay_ns,
        kernels=sum(result.kernels for result in pod_run.results),
        kernels_per_s=rate,
        vs_alone=rate / alone_rate if alone_rate else 0.0,
        latency_us=_latencies(pod_run.results),
        alone_latency_us=_latencies(alone),
    )


def _alone(workloads: Sequence[Workload], stay_ns: int) -> list[Progress]:
    """Run a pod's workloads on an empty card long enough to measure them, but not longer than the pod's stay."""
    long_ns = max(round((load.warmup_s + load.period_us * _ALONE_PERIODS / 1e6) * NS_PER_S) for load in workloads)
    end_ns = stay_ns if any(load.trace for load in workloads) else min(stay_ns, long_ns + _ALONE_NS)
    host = SimHost()
    host.admit("alone", {0: Grant()})
    loads = [host.start_load("alone", 0, workload) for workload in workloads]
    backend = host.backend(0)
    while backend.now_ns < end_ns:
        backend.sample()
        backend.wait(end_ns - backend.now_ns)
    return [host.progress(load) for load in loads]


def _rate(results: Sequence[Progress]) -> float:
    return sum(result.kernels / result.elapsed_s for result in results if result.elapsed_s)


def _latencies(results: Sequence[Progress]) -> Latencies | None:
    ordered = sorted(latency for result in results for latency in result.latencies_us)
    if not ordered:
        return None
    return Latencies(len(ordered), percentile(ordered, 50), percentile(ordered, 99), ordered[-1])
