"""A load on a simulated pGPU: the daemon runs it, and this module polls its progress.

The simulator has its own clock, which keeps pace with real time. Progress is recorded at the simulator's time.
"""

from __future__ import annotations

import time
from dataclasses import replace

from qgpu.errors import DaemonUnreachableError
from qgpu.ipc.control_socket import Client
from qgpu.load.record import Record
from qgpu.model import NS_PER_S
from qgpu.paths import client_runtime_dir

_POLL_NS = 20_000_000


class SimulatedDevice:
    """Runs loads of one pod on one simulated pGPU. Methods raise the daemon's errors as QgpuError."""

    def __init__(self, pod: str, gpu: int) -> None:
        self._client = Client(client_runtime_dir())
        self._pod, self._gpu = pod, gpu
        self.name = str(self._client.call("sim.card", gpu=gpu)["name"])

    def run(self, record: Record) -> None:
        """Run ``record.work`` until the record is complete."""
        # As for a real load, the record decides what counts and when the load is over.
        endless = replace(record.work, duration_s=0.0, count=0, warmup_s=0.0)
        answer = self._client.call("sim.start", pod=self._pod, gpu=self._gpu, workload=endless.to_dict())
        began_ns, kernels = time.perf_counter_ns(), 0
        look_ns = min(_POLL_NS, record.window_ns // 2)
        while True:
            try:
                progress = self._client.call("sim.progress", load=answer["load"])
            except DaemonUnreachableError:
                if record.stop.asked:  # both are told to end at once; what was done so far is the result
                    return
                raise
            now_ns = began_ns + round(progress["elapsed_s"] * NS_PER_S)
            record.done(now_ns, progress["kernels"] - kernels, progress["latencies_us"])
            kernels = progress["kernels"]
            if progress["done"] or not record.going(now_ns):
                return
            time.sleep(look_ns / NS_PER_S)
