"""Processes on several GPUs that compute and then reduce over all of them, step after step: training in miniature.

    python bench/collective.py --ranks 2 --store FILE --json RESULT             # one process starts the others
    python bench/collective.py --ranks 2 --rank 1 --store FILE --json RESULT    # one of them by itself

Needs torch with NCCL. Prints ``ready`` after the first steps and ends on SIGTERM. The first rank writes the same file
as qgpu-load, with steps in place of kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from qgpu.load.record import Record, Stop
from qgpu.load.workload import Workload

#: Four products of matrices of this width, then a sum of this many values over all GPUs: about 1.5 ms on an H200.
WIDTH = 4096
PRODUCTS = 4
VALUES = 16 * 1024 * 1024
WARM_UP = 20


def main() -> None:
    """Run until told to stop."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, help="be this one only; else the first, which starts the others")
    parser.add_argument("--store", type=Path, required=True, help="a file that is not there yet")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    others = []
    if options.rank is None:
        command = [sys.executable, __file__, "--ranks", str(options.ranks), "--store", str(options.store)]
        others = [
            subprocess.Popen([*command, "--rank", str(rank), "--json", os.devnull]) for rank in range(1, options.ranks)
        ]
    rank = options.rank or 0
    stop = Stop()
    if rank == 0:  # the signal also ends the others, and rank 0 does not wait for them
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(stop, "asked", True))
    try:
        step = stepper(rank, options.ranks, options.store)
        for _ in range(WARM_UP):
            step()
        print("ready", flush=True)
        record = Record(Workload(), time.perf_counter_ns(), stop, 10_000_000)
        while not stop.asked:
            step()
            record.done(time.perf_counter_ns(), 1)
        if rank == 0:
            options.json.write_text(json.dumps(record.report()))
    finally:
        for other in others:
            other.kill()
            other.wait()
    sys.stdout.flush()
    os._exit(0)  # torch would wait for peers that have ended


def stepper(rank: int, ranks: int, store: Path) -> Callable[[], None]:
    """Join the others and return a function that runs one step and waits for it."""
    # NVLink multicast is missing where hypervisors leave it out.
    for name, value in (("NCCL_SOCKET_IFNAME", "lo"), ("NCCL_NVLS_ENABLE", "0")):
        os.environ.setdefault(name, value)
    import torch
    from torch import distributed

    torch.cuda.set_device(rank if torch.cuda.device_count() > 1 else 0)
    distributed.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    matrix = torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.float16) / WIDTH**0.5
    values = torch.zeros(VALUES, device="cuda")

    def step() -> None:
        product = matrix
        for _ in range(PRODUCTS):
            product = product @ matrix
        distributed.all_reduce(values)
        torch.cuda.synchronize()

    return step


if __name__ == "__main__":
    main()
