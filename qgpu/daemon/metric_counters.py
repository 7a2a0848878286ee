"""What the daemon counts for its metrics endpoint."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence

import qgpu
from qgpu.daemon.device_isolation import DeviceIsolation
from qgpu.daemon.expected_wait import expected_wait_p99_ns
from qgpu.daemon.gpu_loop import GpuLoop
from qgpu.daemon.memory_turns import MemoryTurns
from qgpu.daemon.plane_choice import PlaneChoice, driver_version
from qgpu.daemon.pod_usage import UNSEEN, PodUsage, pod_usages
from qgpu.daemon.pods import Pods
from qgpu.daemon.suspensions import Suspensions
from qgpu.daemon.trace_recordings import TraceRecordings
from qgpu.daemon.unmanaged_processes import UnmanagedProcesses
from qgpu.metrics.tally import Tally
from qgpu.metrics.view import GpuView, PodMoves, PodOnGpuView, PodView, View
from qgpu.model.container_labels import ContainerLabels
from qgpu.model.plane_api import PodInfo
from qgpu.model.plane_names import Plane
from qgpu.model.suspension import Residency


class Counters:
    """Counts with every tick of the loops, and builds a view on request."""

    def __init__(
        self,
        pods: Pods,
        chosen: PlaneChoice,
        loops: Mapping[int, GpuLoop],
        traces: TraceRecordings,
        isolation: DeviceIsolation,
        unmanaged: UnmanagedProcesses,
        suspensions: Suspensions,
        turns: MemoryTurns,
    ) -> None:
        self._turns = turns
        self._suspensions = suspensions
        self._isolation, self._unmanaged = isolation, unmanaged
        self._pods, self._chosen, self._loops, self._traces = pods, chosen, loops, traces
        self._driver = driver_version(chosen.plane)
        self._started_ns = time.monotonic_ns()
        self._tallies = {index: Tally() for index in loops}
        for index, loop in loops.items():
            loop.watch(self._tallies[index].watch)

    def usages(self) -> Mapping[int, Mapping[str, PodUsage]]:
        """Return how every pod stands, by pGPU and name."""
        return {
            index: pod_usages(loop.ledger, self._tallies[index], loop.settings) for index, loop in self._loops.items()
        }

    def view(self) -> View:
        """Return the current view. Raises QgpuError while the plane is gone."""
        pods = [(pod, self._pods.labels_of(pod)) for pod in self._pods.listed()]
        return View(
            qgpu.__version__,
            self._chosen.plane.value,
            self._driver,
            platform.node(),
            (time.monotonic_ns() - self._started_ns) / 1e9,
            [self._gpu(index, pods) for index in self._loops],
            {pod.name: self._pod(pod, labels) for pod, labels in pods},
            self._traces.count,
            self._isolation.enforced if self._chosen.plane is not Plane.SIM else None,
            self._isolation.refused(),
        )

    def _pod(self, pod: PodInfo, labels: ContainerLabels) -> PodView:
        found, totals = self._suspensions.state(pod.name), self._suspensions.totals(pod.name)
        return PodView(
            pod.name,
            pod.refused_memory,
            pod.refused_calls,
            found.residency is Residency.SUSPENDED,
            sum(found.memory.values()) if found.residency is Residency.SUSPENDED else 0,
            bool(self._turns.waits(pod)),
            [
                PodMoves("off", totals.off.count, totals.off.seconds, totals.off.bytes),
                PodMoves("back", totals.back.count, totals.back.seconds, totals.back.bytes),
                PodMoves("between", totals.between.count, totals.between.seconds, totals.between.bytes),
                PodMoves("failed", totals.failed, 0.0, 0),
            ],
            labels,
        )

    def _gpu(self, index: int, pods: Sequence[tuple[PodInfo, ContainerLabels]]) -> GpuView:
        loop, tally = self._loops[index], self._tallies[index]
        ledger, settings = loop.ledger, loop.settings
        usage = pod_usages(ledger, tally, settings)
        prepared = [held.grant for held in self._pods.prepared.held() if held.index == index]
        return GpuView(
            self._pods.cards[index],
            settings.policy,
            settings.online_policy,
            settings.period_ns,
            tally.ticks,
            tally.plans,
            ledger.plan is not None and ledger.plan.gated,
            loop.problem,
            [
                PodOnGpuView(
                    pod.name,
                    pod.grants[index],
                    account.used_ns if account else 0,
                    stands.counted,
                    account.debt_ns if account else 0,
                    account.busy if account else False,
                    pod.memory.get(index, 0),
                    stands.recent.share,
                    labels,
                    stands.switch_ns,
                    stands.below_quota,
                    expected_wait_p99_ns(ledger, pod.name),
                )
                for pod, labels in pods
                if index in pod.grants
                for account, stands in ((ledger.accounts.get(pod.name), usage.get(pod.name, UNSEEN)),)
            ],
            None if (there := self._unmanaged.seen.get(index)) is None else len(there),
            sum(grant.memory or 0 for grant in prepared),
            sum(grant.cores or 0 for grant in prepared),
            ledger.utilization,
            settings.memory_overcommit,
            self._turns.yielded_bytes(index, [pod for pod, _ in pods]),
            self._turns.shortage(index),
        )
