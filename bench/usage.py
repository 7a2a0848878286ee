"""GPU time over time, as the daemon's ledger reports it, tick by tick, and the error of shares."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness import Bench

from qgpu.ipc.control_socket import Client
from qgpu.model import NS_PER_S

_POLL_S = 0.03
#: Windows that differ by at most this part of their length count as equal.
_SAME = 0.01


@dataclass(frozen=True, slots=True)
class Tick:
    """One tick of the ledger: its time by its own clock, and the GPU time of each pod so far."""

    now_ns: int
    used_ns: Mapping[str, int]


def watch(bench: Bench, seconds: float) -> list[Tick]:
    """Read the ledger for ``seconds``, and each tick once."""
    ticks: dict[int, Tick] = {}
    until = time.monotonic() + seconds
    with Client(bench.runtime_dir) as client:
        while time.monotonic() < until:
            usage = {pod["name"]: pod["usage"][0] for pod in client.call("pod.list")["pods"]}
            times = {use["now_ns"] for use in usage.values()}
            if len(times) == 1:  # otherwise a tick came while the daemon answered
                now_ns = times.pop()
                ticks.setdefault(now_ns, Tick(now_ns, {name: use["used_ns"] for name, use in usage.items()}))
            time.sleep(_POLL_S)
    return list(ticks.values())


def windows(ticks: Sequence[Tick], window_ns: int) -> Iterator[dict[str, float]]:
    """Yield each pod's part of the GPU time used, for every window of this length from one tick to another.

    If the daemon was late for a tick, some windows have no tick at their end. Those are left out: pods take turns, so a
    longer window would show the turns that it cuts, not shares.
    """
    for index, first in enumerate(ticks):
        for last in ticks[index + 1 :]:
            length_ns = last.now_ns - first.now_ns
            if abs(length_ns / window_ns - 1) > _SAME:
                continue
            used = {name: value - first.used_ns[name] for name, value in last.used_ns.items()}
            if total := sum(used.values()):
                yield {name: value / total for name, value in used.items()}


def seconds_of(ticks: Sequence[Tick]) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield, for each second in order, its end (s since the first tick) and each pod's part of it.

    A second begins and ends with a tick, so it may be late by one; a second without GPU time is left out.
    """
    first = ticks[0]
    for tick in ticks:
        if tick.now_ns - first.now_ns < NS_PER_S * (1 - _SAME):
            continue
        used = {name: value - first.used_ns.get(name, 0) for name, value in tick.used_ns.items()}
        if total := sum(used.values()):
            yield (tick.now_ns - ticks[0].now_ns) / NS_PER_S, {name: value / total for name, value in used.items()}
        first = tick


def errors_pp(ticks: Sequence[Tick], quotas: Mapping[str, int], window_ns: int) -> list[float]:
    """Return how far each pod's part is from its quota, in percentage points, ascending; one per pod and window."""
    whole = sum(quotas.values())
    return sorted(
        100 * abs(shares[name] - cores / whole)
        for shares in windows(ticks, window_ns)
        for name, cores in quotas.items()
    )
