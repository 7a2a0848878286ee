"""Compare a process without any daemon on the machine to the same process in a pod, in turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from figures import Figure, at_least, median
from script import Script

RATIO = 0.995


def in_turn(script: Script, turns: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Run a load of 1 ms kernels plainly and then in a pod without settings; yield both results."""
    bench = script.bench
    options = bench.load_options("1ms", "--warmup", "300ms", "--duration", f"{1200 * script.scale:.0f}ms")
    for _ in range(turns):
        plain = bench.plain(*options)
        with bench.daemon():
            pod = bench.run_pod(*options)
        yield plain, pod


def ratio(found: list[tuple[dict[str, Any], dict[str, Any]]]) -> Figure:
    """Return the figure: the speed in a pod over the speed without qgpu."""
    rates = [pod["kernels_per_s"] / plain["kernels_per_s"] for plain, pod in found]
    return median("alone_ratio", rates, *at_least(RATIO), note="1 ms kernels, pod alone over plain, pairs in turn")
