"""The kmod plane under the contract suite: processes in cgroups, qgpu.ko, and a simulated driver, in the VM."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from qgpu.linux import cgroup
from qgpu.load.workload import Workload
from qgpu.model import NS_PER_S
from qgpu.planes.kmod.backend import LEASE_NS

sys.path.insert(0, str(Path(__file__).parent.parent / "vm" / "guest"))

import nv
import qg
import simcard


def _load(state: dict[str, Any], kernel_us: float, count: int, period_us: float) -> None:
    p = state["p"] = nv.Program()
    _, (state["channel"],) = p.compute()
    p.submit(state["channel"], kernel_us, count, period_us)


def _query(state: dict[str, Any]) -> dict[str, Any]:
    return state["p"].query(state["channel"])


class KmodRig:
    """One module on one simulated card."""

    pgpu = 0
    lease_ns = LEASE_NS
    tries = 3

    def __init__(self) -> None:
        self.host = simcard.open_host()
        self._loads: list[qg.Process] = []
        self._containers: list[str] = []
        self._seen: dict[int, int] = {}

    def start(self, pod: str, workload: Workload) -> int:
        """Start a process, bring it into its pod, and let it put its load on the card."""
        process = qg.Process(None)
        self.host.attach(pod, process.pid, ())
        count = workload.batch if workload.period_us else nv.FLOOD
        process.run(_load, workload.kernel_us, count, workload.period_us)
        self._loads.append(process)
        return len(self._loads) - 1

    def container(self) -> str:
        """Make a cgroup."""
        cgroup.create("container")
        self._containers.append("container")
        return cgroup.path_of("container")

    def kill(self, load: int) -> None:
        """Kill it."""
        self._loads[load].kill()

    def kernels(self, load: int) -> int:
        """Count its kernels."""
        return int(self._loads[load].run(_query)["kernels"])

    def latencies_us(self, load: int) -> list[float]:
        """Return its latencies since last asked."""
        answer = self._loads[load].run(_query)
        fresh = answer["nr_latencies"] - self._seen.get(load, 0)
        self._seen[load] = answer["nr_latencies"]
        return [float(each) for each in answer["latencies_us"][-fresh:]] if fresh else []

    def pass_time(self, duration_ns: int) -> None:
        """Sleep: time is what is tested here."""
        time.sleep(duration_ns / NS_PER_S)

    def restart(self) -> None:
        """Open the module anew; the pods are the module's."""
        self.host.close()
        self.host = simcard.open_host()

    def close(self) -> None:
        """Kill what runs, and forget the pods."""
        for process in self._loads:
            process.kill()
        for pod in self.host.pods():
            self.host.retire(pod.name)
        for name in self._containers:
            cgroup.remove(name)
        self.host.close()


@contextmanager
def _module() -> Iterator[None]:
    qg.insmod("qgpu.ko")
    try:
        yield
    finally:
        qg.rmmod("qgpu")


@contextmanager
def open_rig(_directory: Path) -> Iterator[KmodRig]:
    """Give the module to a test, and take it back; what was loaded before stays."""
    with (
        nullcontext() if qg.loaded("nvidia") else qg.driver(),
        nullcontext() if qg.loaded("qgpu") else _module(),
    ):
        rig = KmodRig()
        try:
            yield rig
        finally:
            rig.close()
