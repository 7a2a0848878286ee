"""A process that infers batch after batch and waits for each; their size it reads from a file beside RESULT.

    python bench/inference.py --engine resnet50 --sizes 16,32,64 --json RESULT

Size 0 is rest; ``64 graph`` is a batch of 64 by a CUDA graph. It prints ``ready`` when everything has run once, ends on
SIGTERM, and writes what qgpu-load does, with images in place of kernels, and for each window how long the host took
to launch the batches that ended in it (``launches``: ms, batches). Engines: ``resnet50`` (torch), by graphs or
kernel by kernel; ``kernels``, qgpu-load's kernel as an image of 60 µs with 100 µs between batches; in a pod of a
simulated plane the latter is simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, cast

from qgpu.load.record import Record, Stop
from qgpu.load.workload import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, NS_PER_US

IMAGE_US = 60
GAP_US = 100
_POLL_NS = 10_000_000
_SUFFIX = ".size"


class Batch(NamedTuple):
    """The number of images, and whether to use a CUDA graph."""

    size: int
    graph: bool = False


#: Called when a batch has ended, with its number of images and its launch time (ns).
Done = Callable[[int, int, int], None]
#: Runs batches until told to stop, and reports each.
Engine = Callable[[Batch, Callable[[], bool], Done], None]


class Control:
    """The file that sets the batch size."""

    def __init__(self, result: Path) -> None:
        self._file = result.with_suffix(_SUFFIX)
        self._batch = Batch(0)
        self._looked_ns = 0

    def batch(self) -> Batch:
        """Return the requested batch size, at most 10 ms old."""
        now_ns = time.perf_counter_ns()
        if now_ns - self._looked_ns >= _POLL_NS:
            self._looked_ns = now_ns
            with suppress(FileNotFoundError):
                size, *graph = self._file.read_text().split()
                self._batch = Batch(int(size), bool(graph))
        return self._batch


def ask(result: Path, batch: Batch) -> None:
    """Ask the process that writes ``result`` for other batches; size 0 is rest."""
    fresh = result.with_suffix(".new")
    fresh.write_text(f"{batch.size} graph" if batch.graph else str(batch.size))
    fresh.replace(result.with_suffix(_SUFFIX))


def main() -> None:
    """Run until told to stop."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=["resnet50", "kernels"], required=True)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], required=True)
    parser.add_argument("--iterations", type=int, help="of a kernel of 60 us")
    parser.add_argument("--window-ms", type=int, default=10)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: setattr(stop, "asked", True))
    run = _simulated() if os.environ.get("QGPU_PLANE") == "sim" else _engine(options.engine, options.iterations, stop)
    for graph in (False, True) if options.engine == "resnet50" else (False,):
        for size in options.sizes:
            turns = iter((True, True, True, False))
            run(Batch(size, graph), turns.__next__, lambda *_: None)
    print("ready", flush=True)
    control = Control(options.json)
    record = Record(Workload(), time.perf_counter_ns(), stop, options.window_ms * 1_000_000)
    launches: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0])

    def done(now_ns: int, images: int, launching_ns: int) -> None:
        record.done(now_ns, images)
        window = launches[(now_ns - record.start_ns) // record.window_ns]
        window[0] += launching_ns / NS_PER_MS
        window[1] += 1

    while not stop.asked:
        batch = control.batch()
        if batch.size:

            def unchanged(batch: Batch = batch) -> bool:
                return not stop.asked and control.batch() == batch

            run(batch, unchanged, done)
        else:
            time.sleep(0.002)
    record.going(time.perf_counter_ns())
    report = record.report()
    windows = cast("list[list[float]]", report["windows"])
    report["launches"] = [[at, *launches[n]] for n, (at, _) in enumerate(windows)]
    options.json.write_text(json.dumps(report))


def _engine(name: str, iterations: int | None, stop: Stop) -> Engine:
    if name == "resnet50":
        from resnet import inference

        infer, gap_us = inference(), 0
    else:
        infer, gap_us = _kernels(iterations), GAP_US

    def run(batch: Batch, going: Callable[[], bool], done: Done) -> None:
        while going():
            began_ns = time.perf_counter_ns()
            launched_ns = infer(batch)
            done(now_ns := time.perf_counter_ns(), batch.size, launched_ns - began_ns)
            if gap_us:
                stop.wait_until(now_ns + gap_us * NS_PER_US)

    return run


def _kernels(iterations: int | None) -> Callable[[Batch], int]:
    from qgpu.load.cuda import Cuda, Device, Sync
    from qgpu.load.kernel import Kernel

    kernel = Kernel(Device(Cuda(), 0, Sync.SPIN), 1)
    if iterations is None:
        kernel.calibrate(IMAGE_US)
    else:
        kernel.iterations = iterations

    def infer(batch: Batch) -> int:
        kernel.launch(kernel.streams[0], batch.size)
        launched_ns = time.perf_counter_ns()
        kernel.synchronize()
        return launched_ns

    return infer


def _simulated() -> Engine:
    from qgpu.ipc.control_socket import Client
    from qgpu.paths import default_runtime_dir

    def run(batch: Batch, going: Callable[[], bool], done: Done) -> None:
        # A simulated load ends with the connection that started it.
        with Client(default_runtime_dir()) as client:
            work = Workload(kernel_us=IMAGE_US, batch=batch.size, gap_us=GAP_US)
            load = client.call("sim.start", pod=os.environ["QGPU_POD"], gpu=0, workload=work.to_dict())["load"]
            began_ns, images = time.perf_counter_ns(), 0
            while going():
                progress = client.call("sim.progress", load=load)
                done(began_ns + round(progress["elapsed_s"] * NS_PER_S), progress["kernels"] - images, 0)
                images = progress["kernels"]
                time.sleep(0.02)

    return run


if __name__ == "__main__":
    main()
