"""Loads on simulated pGPUs. A load stands for a process and ends when its client disconnects."""

from __future__ import annotations

import threading
from dataclasses import asdict
from functools import partial
from typing import Any

from qgpu.daemon.request_args import Arguments
from qgpu.errors import NotSupportedError, no_pgpu
from qgpu.ipc.control_socket import Session
from qgpu.load.workload import Workload
from qgpu.model.plane_api import Host
from qgpu.planes.sim.host import SimHost


class SimulatedLoads:
    """The running loads, by number. ``lock`` is the pods': it is held while pods come and go."""

    def __init__(self, host: Host, lock: threading.RLock) -> None:
        self._host = host
        self._lock = lock
        self._pods: dict[int, str] = {}

    def in_pod(self, name: str) -> bool:
        """Tell whether any load runs in a pod."""
        return name in self._pods.values()

    def card(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Return the name of a card. Raises a QgpuError."""
        names = {pgpu.index: pgpu.name for pgpu in self._sim().pgpus()}
        if (gpu := arguments.need("gpu", int)) not in names:
            raise no_pgpu(gpu, names)
        return {"name": names[gpu]}

    def start(self, session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Start a load and return its number. Raises a QgpuError."""
        sim, pod = self._sim(), arguments.need("pod", str)
        workload = Workload.from_dict(arguments.need("workload", dict))
        with self._lock:
            load = sim.start_load(pod, arguments.need("gpu", int), workload)
            self._pods[load] = pod
            session.at_end.append(partial(self._stop, load))
        return {"load": load}

    def progress(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Return the progress of a load."""
        return asdict(self._sim().progress(arguments.need("load", int)))

    def _stop(self, load: int) -> None:
        with self._lock:
            self._sim().stop_load(load)
            del self._pods[load]

    def _sim(self) -> SimHost:
        if not isinstance(self._host, SimHost):
            raise NotSupportedError(f"plane {self._host.plane}: simulated loads run on plane sim only")
        return self._host
