"""Measure a card's row of qgpu/model/hardware_traits.py from the context switches of two pods that flood it 2:1.

    python bench/hardware_traits.py [--plane seccomp|kmod|sim] [--seconds 2]

Prints timeslice_us_ns and switched_ns, by which a turn's length follows from its timeslice, and gap_ns. The table of
latencies by slices (p99_us) takes slices set by hand and is not measured here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise

from harness import Bench
from script import DRIVER

from qgpu.ipc.control_socket import Client
from qgpu.model import NS_PER_MS, NS_PER_US
from qgpu.model.hardware_traits import HardwareTraits, traits
from qgpu.nvidia.gpu_time import HANDOVER_NS
from qgpu.trace.recording import GpuTrack, record

PERIODS_MS = (20, 50, 100)

#: For this long after a new plan, turns of the old one still end.
_SETTLED_NS = 200 * NS_PER_MS
#: Turns count as full length if their middle half differs by no more than this part.
_EVEN = 0.02


def turns(track: GpuTrack) -> Iterator[tuple[int, float]]:
    """Yield timeslice and turn length in ns, for each pod and plan under which the pod exhausted its turns."""
    ends = [at_ns for at_ns, _ in track.plans[1:]] + [track.last_ns]
    for (since_ns, plan), until_ns in zip(track.plans, ends, strict=True):
        for part in plan["pods"]:
            runs = track.pods[part["pod"]].runs
            inside = [end - start for start, end in runs if start >= since_ns + _SETTLED_NS and end <= until_ns]
            if part["windows"] is None and len(inside) >= 8:
                low, middle, high = statistics.quantiles(inside, n=4)
                if high - low <= _EVEN * middle:
                    yield part["timeslice_us"], middle


def gaps(track: GpuTrack) -> list[int]:
    """Return how long the engine was empty between turns of different pods."""
    runs = sorted((start, end, name) for name, pod in track.pods.items() for start, end in pod.runs)
    return [
        after[0] - before[1]
        for before, after in pairwise(runs)
        if before[2] != after[2] and 0 < after[0] - before[1] < HANDOVER_NS
    ]


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def measure(bench: Bench, seconds: float) -> HardwareTraits:
    """Let two pods flood the card under a few periods, and read their turns."""
    lengths: list[tuple[int, float]] = []
    between: list[int] = []
    with bench.daemon():
        pods = [bench.pod("two", "1ms", cores=60), bench.pod("one", "1ms", cores=30)]
        bench.wait_busy(*pods)
        for period_ms in PERIODS_MS:
            bench.policy("burst-share", f"{period_ms}ms")
            with Client(bench.runtime_dir) as client:
                track = record(client, seconds, 0, _wait).gpus[0]
            lengths += turns(track)
            between += gaps(track)
    for slice_us, length_ns in sorted(lengths):
        print(f"{slice_us:7} µs  {length_ns / NS_PER_US:9.1f} µs a turn")
    slope, charged_ns = statistics.linear_regression(*zip(*lengths, strict=True))
    row = traits(track.name)
    return HardwareTraits(
        track.name, round(slope), round(charged_ns), round(statistics.median(between)), row.p99_us, row.alone_p99_us
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plane", default="seccomp" if DRIVER.exists() else "sim", choices=["sim", "seccomp", "kmod"])
    parser.add_argument("--seconds", type=float, default=2.0, help="recorded under each period")
    options = parser.parse_args()
    bench = Bench(options.plane)
    try:
        found = measure(bench, options.seconds)
    finally:
        bench.close()
    known = traits(found.model)
    print(f"{found.model}; in qgpu/model/hardware_traits.py (row {known.model or 'of other cards'}):")
    for name in ("timeslice_us_ns", "switched_ns", "gap_ns"):
        print(f"    {name}={getattr(found, name)},  # {getattr(known, name)}")


if __name__ == "__main__":
    main()
