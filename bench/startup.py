"""How long a CUDA program takes from exec to the end of its first kernel: alone, and beside a flood.

    python bench/startup.py        # on a GPU, as root

Plainly and in a pod, in turn; beside a flood that is plain or a pod likewise. The daemon runs throughout, so that the
driver stays loaded between plain programs, as it does with persistence mode.
"""

from __future__ import annotations

import statistics
import sys

from figures import Figure, median
from plots import Plot
from pods import Pod
from rivals import PLAIN, QGPU
from script import NotHereError, Script, listed, run, spread

FLOODS = ("1ms", "100ms")
_ALONE, _ROUNDS, _BESIDE = 12, 2, 3


def startup(script: Script) -> list[Figure]:
    """Start programs one after the other: alone, then beside each flood; plainly and with qgpu in turn."""
    bench = script.bench
    if bench.simulated:
        raise NotHereError("a simulated program has nothing to start")
    script.calibrate(FLOODS)
    found: dict[str, dict[str, list[float]]] = {PLAIN: {}, QGPU: {}}

    def starts(name: str, beside: str, times: int) -> None:
        start = bench.run_pod if name == QGPU else bench.plain
        options = bench.load_options("1ms", "--duration", "50ms")
        found[name].setdefault(beside, []).extend(start(*options)["startup_s"] for _ in range(times))

    with bench.daemon():
        for _ in range(round(_ALONE * script.scale)):
            for name in (PLAIN, QGPU):
                starts(name, "alone", 1)
        for kernel in FLOODS:
            for number in range(_ROUNDS):
                for name in (PLAIN, QGPU):
                    flood = _flood(script, name, f"flood-{kernel}-{number}", kernel)
                    starts(name, f"flood of {kernel}", _BESIDE)
                    flood.stop()
    for beside in found[PLAIN]:
        script.say(f"{beside}: plain {listed(found[PLAIN][beside])} s, in a pod {listed(found[QGPU][beside])} s")
    lines = {name: [spread(beside, seconds) for beside, seconds in each.items()] for name, each in found.items()}
    script.plots.append(Plot("start of a CUDA program", "", "exec to first kernel done, s", lines))
    figures = []
    for beside, plain in found[PLAIN].items():
        ours, short = found[QGPU][beside], beside.replace(" of ", "_")
        figures.append(median(f"startup_s_plain_{short}", plain, note=f"plain, {beside}; exec to first kernel done"))
        figures.append(median(f"startup_s_{short}", ours, note=f"in a pod, {beside}"))
        ratio = statistics.median(ours) / statistics.median(plain)
        figures.append(Figure(f"startup_ratio_{short}", ratio, note=f"medians, in a pod over plain, {beside}"))
    return figures


def _flood(script: Script, name: str, called: str, kernel: str) -> Pod:
    """Start a flood in a pod or plainly, and wait until it runs."""
    if name == QGPU:
        flood = script.bench.pod(called, kernel)
        script.running(flood)
    else:
        flood = script.bench.outside(called, kernel)
        script.running_outside(flood)
    return flood


if __name__ == "__main__":
    sys.exit(run("startup", {"startup": startup}, __doc__ or ""))
