"""A load on a real GPU whose progress can be watched from outside: its own program, run inside the pod.

Arguments: a file for the counter, a file for latencies, the workload as JSON, iterations of a kernel.
"""

from __future__ import annotations

import json
import mmap
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from qgpu.load import run
from qgpu.load.cuda import Cuda, Device, Sync
from qgpu.load.kernel import Kernel
from qgpu.load.record import Record, Stop
from qgpu.load.workload import Workload


class Live(Record):
    """A record that is written down as it grows."""

    counter: mmap.mmap
    latencies: Path

    def done(self, now_ns: int, kernels: int, latencies_us: Iterable[float] = ()) -> None:
        """Note kernels, and show them."""
        self.kernels += kernels
        self.counter[:8] = struct.pack("<Q", self.kernels)
        if latencies := [f"{latency}\n" for latency in latencies_us]:
            with self.latencies.open("a") as file:
                file.writelines(latencies)


def main() -> None:
    """Run until killed."""
    counter, latencies, workload, iterations = sys.argv[1:]
    work = Workload.from_dict(json.loads(workload))
    kernel = Kernel(Device(Cuda(), 0, Sync.SPIN), work.streams)
    kernel.iterations = int(iterations)
    record = Live(work, time.perf_counter_ns(), Stop())
    with open(counter, "r+b") as file:
        record.counter = mmap.mmap(file.fileno(), 8)
    record.latencies = Path(latencies)
    run.run(kernel, record)


if __name__ == "__main__":
    main()
