"""Compare a process without any daemon on the machine to the same process in a pod, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from figures import Figure, at_least, at_most, median
from script import Script, listed

RATIO = 0.995
_TURNS = 5


def alone(script: Script) -> list[Figure]:
    """Compare the speed and start-up of a load without qgpu and alone in a pod, in turn."""
    script.need_card()
    found = list(in_turn(script, _TURNS))
    starts = [(plain["startup_s"], pod["startup_s"]) for plain, pod in found]
    script.say(f"alone: start-up, plain and in a pod: {'; '.join(map(listed, starts))} s")
    plain_s, pod_s = (statistics.median(column) for column in zip(*starts, strict=True))
    startup, holds = pod_s / plain_s, at_most(1.10)
    each = tuple(pod / plain for plain, pod in starts)
    note = f"median {pod_s * 1000:.0f} ms in a pod, {plain_s * 1000:.0f} ms plain, exec to first kernel done"
    return [
        ratio(found),
        Figure("startup_ratio", startup, each, holds[0], holds[1](startup), note),
    ]


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
