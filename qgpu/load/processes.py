"""One load in several processes: started alike, ended together, with one result.

The result adds up the kernels on one clock. Its latency is that of the process with the worst one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qgpu.errors import QgpuError
from qgpu.linux.interpreter import python
from qgpu.load.record import Stop
from qgpu.model import NS_PER_S

_POLL_S = 0.02


def run(processes: int, arguments: Sequence[str], stop: Stop) -> dict[str, Any]:
    """Run ``processes`` times qgpu-load with ``arguments`` until all have ended. Raises QgpuError if one fails."""
    if "--iterations" not in arguments:
        # One process calibrates before the others start and disturb it.
        found = _finish(_start([*arguments, "--count", "1", "--warmup", "0s"], None), stop)["iterations"]
        arguments = [*arguments, *(("--iterations", str(found)) if found else ())]
    with tempfile.TemporaryDirectory(prefix="qgpu-load-") as directory:
        files = [Path(directory) / f"{n}.json" for n in range(processes)]
        children = [_start(arguments, file) for file in files]
        try:
            _wait(children, stop)
        finally:
            for child in children:
                child.kill()
        return added([json.loads(file.read_text()) for file in files])


def added(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one result for several."""
    started_ns = min(result["started_ns"] for result in results)
    ended_ns = max(result["ended_ns"] for result in results)
    kernels = sum(result["kernels"] for result in results)
    elapsed_s = (ended_ns - started_ns) / NS_PER_S
    worst = max((found for result in results if (found := result["latency_us"])), key=_p99, default=None)
    longest = max(results, key=lambda result: len(result["windows"]))["windows"]
    window_s = longest[1][0] if len(longest) > 1 else elapsed_s or 1.0
    counts = Counter[int]()
    for result in results:
        for at_s, count in result["windows"]:
            middle_s = (result["started_ns"] - started_ns) / NS_PER_S + at_s + window_s / 2
            counts[int(middle_s / window_s)] += count
    return {
        **results[0],
        "processes": len(results),
        "elapsed_s": elapsed_s,
        "kernels": kernels,
        "kernels_per_s": kernels / elapsed_s if elapsed_s else 0.0,
        "latency_us": worst,
        "dry": sum(result.get("dry", 0) for result in results),
        "dry_longest_ms": max(result.get("dry_longest_ms", 0.0) for result in results),
        "started_ns": started_ns,
        "ended_ns": ended_ns,
        "windows": [[round(n * window_s, 6), counts[n]] for n in range(max(counts, default=-1) + 1)],
        "startup_s": max(result["startup_s"] for result in results),
    }


def _start(arguments: Sequence[str], file: Path | None) -> subprocess.Popen[str]:
    # If an option is given twice, the last one counts.
    command = python("-m", "qgpu.load.main", *arguments, "--processes", "1", "--json", str(file or "-"))
    return subprocess.Popen(command, stdout=subprocess.PIPE if file is None else None, text=True)


def _wait(children: Sequence[subprocess.Popen[str]], stop: Stop) -> None:
    told = False
    while any(child.poll() is None for child in children):
        if stop.asked and not told:
            told = True
            for child in children:
                child.send_signal(signal.SIGTERM)
        time.sleep(_POLL_S)
    for child in children:
        if child.returncode:
            raise QgpuError(f"one of {len(children)} processes ended with code {child.returncode}")


def _finish(child: subprocess.Popen[str], stop: Stop) -> dict[str, Any]:
    _wait([child], stop)
    assert child.stdout is not None
    found: dict[str, Any] = json.loads(child.stdout.read())
    return found


def _p99(summary: Mapping[str, float]) -> float:
    return summary["p99"]
