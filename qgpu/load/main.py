"""``qgpu-load``: puts a load of known shape on a GPU and prints what it got as one JSON object.

This module turns options into a workload and decides when measuring starts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import click
import psutil

from qgpu import entry_point
from qgpu.entry_point import IntRange
from qgpu.errors import InvalidValueError, NoGpuError
from qgpu.load.processes import run as run_processes
from qgpu.load.record import Record, Stop
from qgpu.load.workload import Workload
from qgpu.model import NS_PER_S
from qgpu.units import parse_duration, parse_memory

_FIRST_ITERATIONS = 100


#: Seconds, from a time such as 50us; bytes, from a size such as 16GiB, or 0.
_TIME = entry_point.Quantity("time", lambda text: parse_duration(text) / NS_PER_S)
_MEMORY = entry_point.Quantity("size", lambda text: 0 if text == "0" else parse_memory(text))
#: Opened before the load begins, so that the result cannot get lost at the end.
_FILE = click.File("w", lazy=False)


@dataclass(frozen=True, slots=True)
class _Request:
    """The options besides the workload itself."""

    work: Workload
    gpu: int
    iterations: int | None
    sync: str
    window_s: float
    start_at_s: float | None
    started_at_s: float
    watch: bool

    def record(self, stop: Stop) -> Record:
        """Wait for the start time, and return the record to fill."""
        warmup_ns = round(self.work.warmup_s * NS_PER_S)
        start_ns = time.perf_counter_ns() + warmup_ns
        if self.start_at_s is not None:
            asked_ns = start_ns - warmup_ns + round((self.start_at_s - time.time()) * NS_PER_S)
            if asked_ns < start_ns:
                click.echo(f"qgpu-load: {(start_ns - asked_ns) / NS_PER_S:.2f} s late for --start-at", err=True)
            start_ns = max(start_ns, asked_ns)
        stop.wait_until(start_ns - warmup_ns)
        window_ns = max(1, round(self.window_s * NS_PER_S))
        return Record(self.work, start_ns, stop, window_ns, watch=_watch if self.watch else None)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--kernel", type=_TIME, default="1ms", show_default=True, help="Length of a kernel on an idle card.")
@click.option("--batch", type=int, help="Kernels per synchronisation; 0: flood.  [default: 0, or 1 with --period]")
@click.option("--gap", type=_TIME, default="0s", help="Pause of the host after each synchronisation.")
@click.option("--launch", type=_TIME, default="0s", help="Host time for each launch of a batch, like a framework's.")
@click.option("--period", type=_TIME, default="0s", help="Start a batch at fixed times, this far apart.")
@click.option("--graph", is_flag=True, help="Launch each batch as a CUDA graph.")
@click.option("--streams", type=int, default=1, show_default=True, help="CUDA streams to spread kernels over.")
@click.option("--persistent", is_flag=True, help="One kernel that runs all the time; --kernel is its round's length.")
@click.option("--host-reads", is_flag=True, help="Each block of that kernel reads host memory after each round.")
@click.option("--memory", type=_MEMORY, default="0", help="Card memory to hold, such as 16GiB (16GB is the same).")
@click.option("--processes", type=IntRange(1, 64), default=1, show_default=True, help="Processes with this load.")
@click.option("--duration", type=_TIME, default="5s", show_default=True, help="How long to measure; 0s: no limit.")
@click.option("--count", type=int, default=0, help="How many kernels at most; 0: no limit.")
@click.option("--warmup", type=_TIME, default="0s", help="Run this long before measuring.")
@click.option("--start-at", type=float, metavar="EPOCH", help="Start measuring at this time (warmed up by then).")
@click.option("--started-at", type=float, metavar="EPOCH", help="When this process was started, for startup_s.")
@click.option("--iterations", type=IntRange(1), help="Length of a kernel from an earlier run; no calibration.")
@click.option("--sync", type=click.Choice(["spin", "yield", "block"]), default="spin", help="How the host waits.")
@click.option("--window", type=_TIME, default="100ms", show_default=True, help="Count kernels in windows this long.")
@click.option("--watch", is_flag=True, help="Print each second's result as a JSON line to stderr.")
@click.option("--gpu", type=IntRange(0), default=0, show_default=True, help="Which GPU.")
@click.option("--json", "file", type=_FILE, help="File for the result as JSON, or -.  [default: - if not a terminal]")
def command(file: IO[str] | None, processes: int, **options: Any) -> None:
    """Run CUDA kernels of known length on a GPU, and print what they got: a line on a terminal, JSON elsewhere.

    In a pod of a simulated plane the load runs on the simulated pGPU. SIGINT and SIGTERM end it early; it still prints
    the result. Exit codes: 1 a CUDA error, 2 usage, 9 no driver or no such GPU, 20 no qgpud, 21
    no memory (both simulated).
    """
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: setattr(stop, "asked", True))
    request = _request(**options)
    if processes > 1:
        result = run_processes(processes, sys.argv[1:], stop)
    else:
        load = _simulated(request) if os.environ.get("QGPU_PLANE") == "sim" else _cuda(request)
        record = request.record(stop)
        load.run(record)
        result = {"device": load.device, **record.report(), "startup_s": load.ready_s - request.started_at_s}
        result |= {"iterations": load.iterations, "gpu_kernel_us": load.kernel_us}
    if file is None and sys.stdout.isatty():
        click.echo(_line(result))
    else:
        work = request.work.to_dict() | {"memory_bytes": request.work.memory}
        click.echo(json.dumps({"schema": "qgpu/v1", "workload": work, **result}), file=file)


entry_point.show_examples(
    command,
    (
        "qgpu-load --kernel 1ms --duration 10s",
        "qgpuctl run --class online -- qgpu-load --kernel 100us --period 10ms --watch",
        "qgpu-load --batch 8 --gap 3ms --json result.json",
    ),
)


def _line(result: Mapping[str, Any]) -> str:
    """Return a result as a person at a terminal wants it; the windows alone would be kilobytes."""
    pod = os.environ.get("QGPU_POD")
    line = f"qgpu-load{f' in pod {pod}' if pod else ''}: {result['kernels']} kernels in {result['elapsed_s']:.1f} s"
    latency_us = result["latency_us"]
    return f"{line}, p99 {latency_us['p99'] / 1000:.2f} ms" if latency_us else line


def _request(*, batch: int | None, duration: float, warmup: float, **rest: Any) -> _Request:
    work = Workload(
        **{f"{name}_us": round(rest[name] * 1e6, 6) for name in ("kernel", "gap", "launch", "period")},
        **{name: rest[name] for name in ("graph", "persistent", "host_reads", "streams", "count", "memory")},
        batch=(1 if rest["period"] else 0) if batch is None else batch,
        duration_s=duration,
        warmup_s=warmup,
    )
    return _Request(
        work,
        **{name: rest[name] for name in ("gpu", "iterations", "sync", "watch")},
        window_s=rest["window"],
        start_at_s=rest["start_at"],
        started_at_s=rest["started_at"] or psutil.Process().create_time(),
    )


def _watch(elapsed_s: float, kernels: int, latency_us: dict[str, float] | None) -> None:
    click.echo(json.dumps({"elapsed_s": elapsed_s, "kernels": kernels, "latency_us": latency_us}), err=True)


@dataclass(frozen=True, slots=True)
class _Load:
    """A load that is ready to run: its first kernel has run, at ``ready_s``."""

    run: Callable[[Record], None]
    device: str
    ready_s: float
    iterations: int | None
    kernel_us: float | None


def _cuda(request: _Request) -> _Load:
    # Imported here, because a simulated load needs neither cffi nor the driver.
    from qgpu.load import run
    from qgpu.load.cuda import Cuda, Device, Sync
    from qgpu.load.kernel import Kernel

    device = Device(Cuda(), request.gpu, Sync[request.sync.upper()])
    if request.work.memory:
        device.hold(request.work.memory)
    kernel = Kernel(device, request.work.streams)
    kernel.iterations = request.iterations or _FIRST_ITERATIONS
    kernel.launch(kernel.streams[0])
    kernel.synchronize()
    ready_s = time.time()
    kernel_us = None if request.iterations else kernel.calibrate(request.work.kernel_us)
    return _Load(lambda record: run.run(kernel, record), device.name, ready_s, kernel.iterations, kernel_us)


def _simulated(request: _Request) -> _Load:
    from qgpu.load.simulated import SimulatedDevice

    gpus, gpu = os.environ.get("QGPU_GPU", "").split(","), request.gpu
    if gpus[0] and gpu >= len(gpus):
        raise NoGpuError(f"no GPU {gpu} in this pod; its last one is --gpu {len(gpus) - 1}")
    if gpus[0] and not gpus[gpu].isdecimal():
        raise InvalidValueError(f"QGPU_GPU: {gpus[gpu]!r} is no number of a pGPU; qgpuctl run sets it")
    device = SimulatedDevice(os.environ.get("QGPU_POD", ""), int(gpus[gpu]) if gpus[0] else gpu)
    return _Load(device.run, device.name, time.time(), None, request.work.kernel_us)


def main() -> None:
    """Run ``qgpu-load``."""
    entry_point.run("qgpu-load", command)


if __name__ == "__main__":
    main()
