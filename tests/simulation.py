"""A simulated pGPU under the real loop and policies, for tests that watch shares second by second."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from qgpu.load.workload import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, Grant, Plan, PodPlan, Sample, Snapshot
from qgpu.model.plane_api import Backend
from qgpu.planes.sim.hardware import H200
from qgpu.planes.sim.host import SimHost
from qgpu.policies.registry import compose
from qgpu.sched import loop
from qgpu.sched.ledger import Ledger

FLOOD = Workload(kernel_us=1000, batch=0)
BATCH_64, BATCH_128, BATCH_256 = (
    Workload(kernel_us=work_us, batch=1, gap_us=gap_us) for work_us, gap_us in ((1000, 184), (7930, 328), (15_211, 330))
)
PERIOD = 100 * NS_PER_MS

#: With QGPU_EXAMPLES, tests of random mixes and of policies try that many times more than by default: 50 takes an hour
#: or so.
MORE = int(os.environ.get("QGPU_EXAMPLES", "1"))


def batches(kernel_us: float, gap_us: float = 20) -> Workload:
    """Return a closed loop that synchronises after each kernel."""
    return Workload(kernel_us=kernel_us, batch=1, gap_us=gap_us)


def eager(step_us: float, part: float, kernels: int = 20) -> Workload:
    """Return a framework that launches kernels one by one, and alone keeps the card busy for this part of the time."""
    each_us = step_us / kernels
    return Workload(kernel_us=each_us * part, batch=kernels, launch_us=each_us, gap_us=20)


def every(period_us: float, kernel_us: float) -> Workload:
    """Return a load that wants this much GPU time at intervals."""
    return Workload(kernel_us=kernel_us, batch=1, period_us=period_us)


class Disturbed:
    """A backend on a busy host: ticks come late, and samples are off by up to a tenth of a ms per pod."""

    def __init__(self, inner: Backend, late_ms: float, seed: int) -> None:
        self._inner = inner
        self._late_ns = round(late_ms * NS_PER_MS)
        self._random = random.Random(seed)

    def sample(self) -> Sample:
        """Sample with an error; what is too much in one sample is missing in the next."""
        sample = self._inner.sample()
        if not self._late_ns:
            return sample
        pods = []
        for pod in sample.pods:
            tsgs = tuple(
                replace(tsg, run_ns=max(1, tsg.run_ns + self._random.randint(-100_000, 100_000))) if tsg.run_ns else tsg
                for tsg in pod.tsgs
            )
            pods.append(replace(pod, tsgs=tsgs))
        return replace(sample, pods=tuple(pods))

    def apply(self, plan: Plan) -> None:
        """Apply."""
        self._inner.apply(plan)

    def wait(self, timeout_ns: int) -> None:
        """Wait, and somewhat longer than asked."""
        self._inner.wait(timeout_ns)
        if self._late_ns:
            self._inner.wait(self._random.randint(1, self._late_ns))

    def close(self) -> None:
        """Close."""
        self._inner.close()


def plain(snapshot: Snapshot) -> Plan:
    """Leave every pod the driver's own timeslice, as without qgpu."""
    parts = (PodPlan(pod.name, pod.grant.pod_class, H200.default_timeslice_us) for pod in snapshot.pods)
    return Plan(snapshot.pgpu, snapshot.period_ns, tuple(parts))


@dataclass(frozen=True)
class Second:
    """A second of a run: each pod's part of it, its work without context switches, and the plans in force."""

    shares: Mapping[str, float]
    work: Mapping[str, float]
    plans: Sequence[Plan]
    ledger: Ledger


class Simulation:
    """A simulated pGPU under one policy."""

    def __init__(
        self,
        policy: str | Callable[[Snapshot], Plan],
        late_ms: float = 0,
        seed: int = 0,
        online: str = "best-effort",
        floor: int = 0,
    ) -> None:
        self.host = SimHost()
        self._sim = self.host.backend(0)
        self._backend = Disturbed(self._sim, late_ms, seed)
        if isinstance(policy, str):
            policy = plain if policy == "plain" else compose(policy, online)
        self._policy = policy
        self._floor = floor
        self._ledger = Ledger(0)
        self._plans: list[Plan] = []

    def add(self, name: str, grant: Grant, *workloads: Workload) -> None:
        """Add a pod and its processes."""
        self.host.admit(name, {0: grant})
        for workload in workloads:
            self.host.start_load(name, 0, workload)

    def seconds(self, number: int) -> Iterator[Second]:
        """Run for some seconds. The results come from the card, not from the ledger."""
        for _ in range(number):
            end_ns = self._sim.now_ns + NS_PER_S
            before, began_ns, self._plans = self._used_ns(), self._sim.now_ns, []
            worked = self._worked_ns()
            while self._sim.now_ns < end_ns:
                settings = loop.Settings(self._plan, PERIOD, self._floor)
                self._ledger = loop.tick(self._backend, settings, self._ledger)
            after, elapsed_ns = self._used_ns(), self._sim.now_ns - began_ns
            yield Second(
                {name: (used - before.get(name, 0)) / elapsed_ns for name, used in after.items()},
                {name: (done - worked.get(name, 0)) / elapsed_ns for name, done in self._worked_ns().items()},
                self._plans,
                self._ledger,
            )

    def pass_by(self, number: int) -> None:
        """Run for some seconds without recording them."""
        for _ in self.seconds(number):
            pass

    def _plan(self, snapshot: Snapshot) -> Plan:
        self._plans.append(self._policy(snapshot))
        return self._plans[-1]

    def _used_ns(self) -> dict[str, int]:
        used: dict[str, int] = {}
        for _, load in self.host._loads.values():
            used[load.pod] = used.get(load.pod, 0) + load.run_ns
        return used

    def _worked_ns(self) -> dict[str, int]:
        worked: dict[str, int] = {}
        for _, load in self.host._loads.values():
            worked[load.pod] = worked.get(load.pod, 0) + load.useful_ns
        return worked
