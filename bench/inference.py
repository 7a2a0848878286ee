"""A process that infers batch after batch and waits for each; their size it reads from a file beside RESULT.

    python bench/inference.py --engine resnet50 --sizes 16,32,64 --json RESULT

Size 0 is rest. It prints ``ready`` when every size has run once, ends on SIGTERM, and writes what qgpu-load does,
with images in place of kernels. Engines: ``resnet50`` (torch); ``kernels``, qgpu-load's kernel as an image of 60 µs
with 100 µs between batches; in a pod of a simulated plane the latter is simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from qgpu.load.record import Record, Stop
from qgpu.load.spec import Workload
from qgpu.model import NS_PER_S, NS_PER_US

IMAGE_US = 60
GAP_US = 100
_LOOK_NS = 10_000_000
_SUFFIX = ".size"

#: Runs batches of a size while told to go on, and says of each when it ended and how many images were in it.
Engine = Callable[[int, Callable[[], bool], Callable[[int, int], None]], None]


class Control:
    """The file that says how large batches are."""

    def __init__(self, result: Path) -> None:
        self._file = result.with_suffix(_SUFFIX)
        self._size = 0
        self._looked_ns = 0

    def size(self) -> int:
        """Return the size asked for, at most 10 ms old."""
        now_ns = time.perf_counter_ns()
        if now_ns - self._looked_ns >= _LOOK_NS:
            self._looked_ns = now_ns
            with suppress(FileNotFoundError):
                self._size = int(self._file.read_text())
        return self._size


def ask(result: Path, size: int) -> None:
    """Ask the process that will write ``result`` for batches of another size; 0 is rest."""
    fresh = result.with_suffix(".new")
    fresh.write_text(str(size))
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
    for size in options.sizes:
        turns = iter((True, True, True, False))
        run(size, turns.__next__, lambda *_: None)
    print("ready", flush=True)
    control = Control(options.json)
    record = Record(Workload(), time.perf_counter_ns(), stop, options.window_ms * 1_000_000)
    while not stop.asked:
        if size := control.size():

            def unchanged(size: int = size) -> bool:
                return not stop.asked and control.size() == size

            run(size, unchanged, record.done)
        else:
            time.sleep(0.002)
    record.going(time.perf_counter_ns())
    options.json.write_text(json.dumps(record.report()))


def _engine(name: str, iterations: int | None, stop: Stop) -> Engine:
    if name == "resnet50":
        from resnet import inference

        infer, gap_us = inference(), 0
    else:
        infer, gap_us = _kernels(iterations), GAP_US

    def run(size: int, going: Callable[[], bool], done: Callable[[int, int], None]) -> None:
        while going():
            infer(size)
            done(now_ns := time.perf_counter_ns(), size)
            if gap_us:
                stop.wait_until(now_ns + gap_us * NS_PER_US)

    return run


def _kernels(iterations: int | None) -> Callable[[int], None]:
    from qgpu.load.cuda import Cuda, Device, Sync
    from qgpu.load.kernel import Kernel

    kernel = Kernel(Device(Cuda(), 0, Sync.SPIN), 1)
    if iterations is None:
        kernel.calibrate(IMAGE_US)
    else:
        kernel.iterations = iterations

    def infer(size: int) -> None:
        kernel.launch(kernel.streams[0], size)
        kernel.synchronize()

    return infer


def _simulated() -> Engine:
    from qgpu.control import Client, default_runtime_dir

    def run(size: int, going: Callable[[], bool], done: Callable[[int, int], None]) -> None:
        # A simulated load ends with the connection that started it.
        with Client(default_runtime_dir()) as client:
            work = Workload(kernel_us=IMAGE_US, batch=size, gap_us=GAP_US)
            load = client.call("sim.start", pod=os.environ["QGPU_POD"], gpu=0, workload=work.to_dict())["load"]
            began_ns, images = time.perf_counter_ns(), 0
            while going():
                progress = client.call("sim.progress", load=load)
                done(began_ns + round(progress["elapsed_s"] * NS_PER_S), progress["kernels"] - images)
                images = progress["kernels"]
                time.sleep(0.02)

    return run


if __name__ == "__main__":
    main()
