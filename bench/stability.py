"""(h) Shares over a minute: whether they stay as required, drift, or oscillate.

    python bench/stability.py

Two mixes, both 2:1 under Burst Share, of pods that wait for their batches. Timeslices alone do not bind such pods, so
feedback has to hold the ratio. One mix has equal batches of 5 ms, for a minute. In the other, the two pods' batches
change a few times a second, independently and at random, from 1 to 15 ms, for half a minute. The simulator runs only
the first, in virtual time; tests/sched/test_feedback.py covers random demands there. Shares are parts of true GPU time,
in every second after the first two.

A loop that oscillates would show seconds with a large error (worst), a sinusoid above the noise (swing: the largest
amplitude among all that a minute of seconds can show), or correlation between seconds (autocorrelation; chance alone
stays below 3/√n). A loop that drifts would show a slope of a line through all seconds (drift).
"""

from __future__ import annotations

import cmath
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from figures import Figure, at_most, median
from inference import IMAGE_US, Batch, ask
from plots import Plot
from script import Script, claim
from testbed import LiveTestbed, SimulatedTestbed, Testbed
from usage import Tick, seconds_of, watch

from qgpu.load.workload import Workload

QUOTAS = {"a": 66, "b": 33}
ASKED = 2 / 3
LIMIT_PP = 1.0
_SETTLE_S = 2.0
_LONG_S, _RANDOM_S = 61, 31
_BATCHES = ("1ms", "--batch", "5", "--gap", "50us")
#: Images of a batch, 60 µs each; and how long a size stays.
_SIZES, _STAYS_S = (16, 32, 64, 128, 256), (0.15, 0.6)
#: The largest lag in seconds of the autocorrelation.
_LAGS = 15


def measure(script: Script) -> list[Figure]:
    """Measure both mixes, and plot every second of them."""
    found = {"batches of 5 ms": list(seconds_of(_equal(script)))}
    if not script.bench.simulated:
        found["batches of 1 to 15 ms, at random"] = list(seconds_of(_random(script)))
    lines = {
        name: [(at_s, round(shares["a"] / shares["b"], 4)) for at_s, shares in each] for name, each in found.items()
    }
    script.plots.append(
        Plot("two pods, 2:1 asked, every second by itself", "seconds", "ratio of GPU time", lines, (1.96, 2.04))
    )
    figures = []
    for (name, each), tag in zip(found.items(), ("", "_random"), strict=False):
        told = stable_figures(name, [shares["a"] for _, shares in each], tag)
        script.say(f"{name}: " + "; ".join(f"{figure.name} {figure.value:.4g}" for figure in told))
        figures += told
    return figures


def _equal(script: Script) -> list[Tick]:
    """Measure two pods with equal batches for a minute; on the simulator in virtual time."""
    if script.bench.simulated:
        return _stood(script, SimulatedTestbed(Workload(kernel_us=1000, batch=5, gap_us=50)))
    with script.bench.daemon():
        return _stood(script, LiveTestbed(script.bench, _BATCHES))


def _stood(script: Script, testbed: Testbed) -> list[Tick]:
    testbed.policy("burst-share")
    for name, cores in QUOTAS.items():
        testbed.start(name, cores)
    testbed.hold(_SETTLE_S)
    return testbed.watch(_LONG_S * script.scale)


def _random(script: Script) -> list[Tick]:
    """Measure two pods for half a minute; at random times one of them changes its batch size."""
    bench = script.bench
    script.calibrate([kernel := f"{IMAGE_US}us"])
    command = [sys.executable, str(Path(__file__).with_name("inference.py")), "--engine", "kernels"]
    command += ["--sizes", ",".join(map(str, _SIZES)), "--iterations", str(bench.iterations[kernel])]
    chance = random.Random(1)  # noqa: S311 (the same batches in every run, not a secret)
    ticks: dict[int, Tick] = {}
    with bench.daemon():
        bench.policy("burst-share")
        pods = [bench.start_pod(name, command, cores=cores) for name, cores in QUOTAS.items()]
        for pod in pods:
            ask(pod.file, Batch(_SIZES[-1]))
        for pod in pods:
            pod.wait_log("ready", 90)
        bench.wait_busy(*pods)
        script.settle(_SETTLE_S)
        until = time.monotonic() + _RANDOM_S * script.scale
        while (left_s := until - time.monotonic()) > 0:
            ask(chance.choice(pods).file, Batch(chance.choice(_SIZES)))
            ticks |= {tick.now_ns: tick for tick in watch(bench, min(left_s, chance.uniform(*_STAYS_S)))}
    return list(ticks.values())


def stable_figures(name: str, shares: Sequence[float], tag: str) -> list[Figure]:
    """Return the error, drift and swing of a series of shares, one per second."""
    off = [100 * (share - ASKED) for share in shares]
    about = f"two pods, {name}, 2:1; {len(off)} seconds after the first {_SETTLE_S:.0f}; by GPU time"
    slope = statistics.linear_regression(range(len(off)), off).slope
    swing, every_s = _swing(off)
    lag = max(range(1, min(_LAGS, len(off) // 2) + 1), key=lambda lag: abs(_echo(off, lag)))
    chance = 3 / math.sqrt(len(off))
    return [
        median(f"stable_ratio{tag}", [share / (1 - share) for share in shares], note=about),
        median(f"stable_worst_pp{tag}", [abs(each) for each in off], *at_most(LIMIT_PP, " pp"), note=about, pick=max),
        Figure(f"stable_sd_pp{tag}", statistics.pstdev(off), note=f"standard deviation of seconds; {about}"),
        median(f"stable_drift_pp_per_min{tag}", [abs(slope) * 60], *at_most(LIMIT_PP / 2, " pp"), note=about),
        median(
            f"stable_swing_pp{tag}",
            [swing],
            *at_most(LIMIT_PP / 4, " pp"),
            note=f"largest amplitude of a sinusoid, one of {every_s:.1f} s; {about}",
        ),
        Figure(
            f"stable_autocorrelation{tag}",
            _echo(off, lag),
            note=f"largest of {_LAGS} lags, at {lag} s; noise alone stays within ±{chance:.2f}; {about}",
        ),
    ]


def _swing(off: Sequence[float]) -> tuple[float, float]:
    """Return the largest amplitude of a sinusoid in a series of seconds, and its period in s."""
    count, middle = len(off), statistics.fmean(off)
    amplitudes = {
        n: 2 / count * abs(sum((y - middle) * cmath.exp(-2j * math.pi * n * at / count) for at, y in enumerate(off)))
        for n in range(1, (count - 1) // 2 + 1)
    }
    most = max(amplitudes, key=lambda n: amplitudes[n])
    return amplitudes[most], count / most


def _echo(off: Sequence[float], lag: int) -> float:
    """Return the autocorrelation at a lag of ``lag`` seconds, from -1 to 1; 0 for a constant series."""
    middle = statistics.fmean(off)
    whole = sum((y - middle) ** 2 for y in off)
    return (
        sum((y - middle) * (later - middle) for y, later in zip(off, off[lag:], strict=False)) / whole if whole else 0
    )


SECTIONS = {"stability": measure}

if __name__ == "__main__":
    claim(SECTIONS, __doc__)
