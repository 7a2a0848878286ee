"""A load on a simulated pGPU: the daemon runs it, this watches it.

Decides nothing but when to look. The simulator works by its own clock, which goes with the wall's, so
progress is noted at the time that the simulator gives for it.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from qgpu import wire
from qgpu.errors import BackendGoneError, DaemonUnreachableError, QgpuError
from qgpu.load.record import Record
from qgpu.model import NS_PER_S

_LOOK_NS = 20_000_000
_TIMEOUT_S = 10


class SimulatedDevice:
    """The daemon of a simulated plane, asked to run loads for one pod."""

    def __init__(self, pod: str, gpu: int) -> None:
        path = os.path.join(os.environ.get("QGPU_RUNTIME_DIR", "/run/qgpu"), "qgpud.sock")
        try:
            self._connection = wire.connect(path, _TIMEOUT_S)
        except OSError as error:
            raise DaemonUnreachableError(f"{path}: {error.strerror or error}; is qgpud running?") from error
        self._pod, self._gpu = pod, gpu
        gpus = {found["index"]: found["name"] for found in self._ask("status")["gpus"]}
        if gpu not in gpus:
            raise QgpuError(f"no pGPU {gpu}")
        self.name = str(gpus[gpu])

    def run(self, record: Record) -> None:
        """Run ``record.work`` until the record says stop."""
        # The record decides what is measured and when it is over, as it does for a real load.
        endless = replace(record.work, duration_s=0.0, count=0, warmup_s=0.0)
        load = self._ask("sim.start", pod=self._pod, gpu=self._gpu, workload=endless.to_dict())["load"]
        began_ns, kernels = time.perf_counter_ns(), 0
        look_ns = min(_LOOK_NS, record.window_ns // 2)
        while True:
            progress = self._ask("sim.progress", load=load)
            now_ns = began_ns + round(progress["elapsed_s"] * NS_PER_S)
            record.done(now_ns, progress["kernels"] - kernels, progress["latencies_us"])
            kernels = progress["kernels"]
            if progress["done"] or not record.going(now_ns):
                return
            time.sleep(look_ns / NS_PER_S)

    def _ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        try:
            self._connection.send({"op": op, **arguments})
            received = self._connection.receive()
        except (OSError, wire.WireError) as error:
            raise BackendGoneError(f"qgpud stopped answering: {error}") from error
        if received is None:
            raise BackendGoneError("qgpud closed the connection")
        answer, _ = received
        if not answer.get("ok"):
            error_ = QgpuError(answer.get("error", "refused without a reason"))
            error_.code = answer.get("code", error_.code)
            raise error_
        return answer
