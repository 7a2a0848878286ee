"""What the daemon counts for its metrics endpoint."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence

import qgpu
from qgpu.daemon.device_isolation import DeviceIsolation
from qgpu.daemon.gpu_loop import GpuLoop
from qgpu.daemon.plane_choice import PlaneChoice, driver_version
from qgpu.daemon.pods import Pods
from qgpu.daemon.trace_recordings import TraceRecordings
from qgpu.daemon.unmanaged_processes import UnmanagedProcesses
from qgpu.metrics.tally import PodTally, Tally
from qgpu.metrics.view import GpuView, PodOnGpuView, PodView, View
from qgpu.model.container_labels import ContainerLabels
from qgpu.model.plane_api import PodInfo
from qgpu.model.plane_names import Plane


class Counters:
    """Counts with every tick of the loops, and builds a view on request."""

    def __init__(
        self,
        pods: Pods,
        chosen: PlaneChoice,
        loops: Mapping[int, GpuLoop],
        traces: TraceRecordings,
        fence: DeviceIsolation,
        unmanaged: UnmanagedProcesses,
    ) -> None:
        self._fence, self._unmanaged = fence, unmanaged
        self._pods, self._chosen, self._loops, self._traces = pods, chosen, loops, traces
        self._driver = driver_version(chosen.plane)
        self._started_ns = time.monotonic_ns()
        self._tallies = {index: Tally() for index in loops}
        for index, loop in loops.items():
            loop.watch(self._tallies[index].watch)

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
            {pod.name: PodView(pod.name, pod.refused_memory, pod.refused_calls, labels) for pod, labels in pods},
            self._traces.count,
            self._fence.enforced if self._chosen.plane is not Plane.SIM else None,
            self._fence.refused(),
        )

    def _gpu(self, index: int, pods: Sequence[tuple[PodInfo, ContainerLabels]]) -> GpuView:
        loop, tally = self._loops[index], self._tallies[index]
        ledger, settings, shares = loop.ledger, loop.settings, tally.shares()
        prepared = [held.grant for held in self._pods.prepared.held() if held.index == index]
        return GpuView(
            self._pods.cards[index],
            settings.policy,
            settings.online_policy,
            settings.period_ns,
            tally.ticks,
            tally.plans,
            ledger.plan is not None and ledger.plan.gated,
            loop.trouble,
            [
                PodOnGpuView(
                    pod.name,
                    pod.grants[index],
                    account.used_ns if account else 0,
                    tally.pods.get(pod.name, PodTally()),
                    account.debt_ns if account else 0,
                    account.busy if account else False,
                    pod.memory.get(index, 0),
                    shares.get(pod.name, 0.0),
                    labels,
                )
                for pod, labels in pods
                if index in pod.grants
                for account in (ledger.accounts.get(pod.name),)
            ],
            None if (there := self._unmanaged.seen.get(index)) is None else len(there),
            sum(grant.memory or 0 for grant in prepared),
            sum(grant.cores or 0 for grant in prepared),
        )
