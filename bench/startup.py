"""How long a CUDA program takes from exec to the end of its first kernel: alone, and beside a pod that floods.

    python bench/startup.py        # on a GPU, as root

Each case is compared with plain sharing. Runs with and without qgpu are minutes apart, so take the spread into account.
"""

from __future__ import annotations

import statistics
import sys

from figures import Figure, median
from plots import Plot
from rivals import PLAIN, QGPU, opened
from script import NotHereError, Script, listed, run, spread

FLOODS = ("1ms", "100ms")
_REPEATS = 5


def startup(script: Script) -> list[Figure]:
    """Start programs one after the other: alone, then beside each flood; plainly and with qgpu."""
    if script.bench.simulated:
        raise NotHereError("a simulated program has nothing to start")
    script.calibrate(FLOODS)
    found: dict[str, dict[str, list[float]]] = {}
    for name in (PLAIN, QGPU):
        with opened(script, name) as way:
            found[name] = {"alone": _starts(script, name)}
            script.say(f"{name}, alone: {listed(found[name]['alone'])} s")
            for kernel in FLOODS:
                flood = way.start("flood", kernel)
                way.running(flood)
                beside = f"flood of {kernel}"
                found[name][beside] = _starts(script, name)
                script.say(f"{name}, {beside}: {listed(found[name][beside])} s")
                flood.stop()
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


def _starts(script: Script, name: str) -> list[float]:
    bench = script.bench
    start = bench.run_pod if name == QGPU else bench.plain
    options = bench.load_options("1ms", "--duration", "50ms")
    return [start(*options)["startup_s"] for _ in range(round(_REPEATS * script.scale))]


if __name__ == "__main__":
    sys.exit(run("startup", {"startup": startup}, __doc__ or ""))
