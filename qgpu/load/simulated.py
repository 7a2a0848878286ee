"""A load on a simulated pGPU: the daemon runs it, this watches it.

Decides nothing but when to look. The simulator works by its own clock, which goes with the wall's, so
progress is noted at the time that the simulator gives for it.
"""

from __future__ import annotations

import time
from dataclasses import replace

from qgpu.errors import no_pgpu
from qgpu.ipc.control_socket import Client
from qgpu.load.record import Record
from qgpu.model import NS_PER_S
from qgpu.paths import default_runtime_dir

_LOOK_NS = 20_000_000


class SimulatedDevice:
    """One simulated pGPU, asked to run loads of one pod. Raises what the daemon answers as a QgpuError."""

    def __init__(self, pod: str, gpu: int) -> None:
        self._client = Client(default_runtime_dir())
        self._pod, self._gpu = pod, gpu
        names = {found["index"]: found["name"] for found in self._client.call("status")["gpus"]}
        if gpu not in names:
            raise no_pgpu(gpu, names)
        self.name = str(names[gpu])

    def run(self, record: Record) -> None:
        """Run ``record.work`` until the record says stop."""
        # The record decides what is measured and when it is over, as it does for a real load.
        endless = replace(record.work, duration_s=0.0, count=0, warmup_s=0.0)
        answer = self._client.call("sim.start", pod=self._pod, gpu=self._gpu, workload=endless.to_dict())
        began_ns, kernels = time.perf_counter_ns(), 0
        look_ns = min(_LOOK_NS, record.window_ns // 2)
        while True:
            progress = self._client.call("sim.progress", load=answer["load"])
            now_ns = began_ns + round(progress["elapsed_s"] * NS_PER_S)
            record.done(now_ns, progress["kernels"] - kernels, progress["latencies_us"])
            kernels = progress["kernels"]
            if progress["done"] or not record.going(now_ns):
                return
            time.sleep(look_ns / NS_PER_S)
